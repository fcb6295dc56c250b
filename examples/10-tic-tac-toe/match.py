"""One game: each agent completes a line where it can, and else takes the first free cell."""

import asyncio

from aenv import Environment


def choose(board, mine):
    """A cell that completes a line, else the first that is free."""
    cells = board.replace("\n", "")
    lines = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
    for line in lines:
        if sorted(cells[cell] for cell in line) == sorted((mine, mine, ".")):
            return next(cell for cell in line if cells[cell] == ".")
    return cells.index(".")


async def main():
    async with Environment("tic-tac-toe") as env:
        board = await env.reset()
        x, o = env.agent("x"), env.agent("o")
        for agent in (x, o):
            print(agent.name, "has", *[tool["name"] for tool in await agent.list_tools()])
        print("o tries first:", (await o.call_tool("place", {"cell": 4})).text)
        sides = [x, o]
        while True:
            placed = await sides[0].call_tool("place", {"cell": choose(board, sides[0].name)})
            if placed.is_error:
                break
            board = placed.text
            sides.reverse()
        print(board)
        print(placed.text)
        print("rewards:", await x.call_reward(), await o.call_reward())


asyncio.run(main())
