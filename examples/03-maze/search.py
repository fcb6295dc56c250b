"""A way through the maze: by a search that forks, and by episodes from the start. Run it here: python search.py"""

import asyncio
import random

from aenv import Environment, ToolResult

DOORS = 4


async def search(env: Environment, seed: int) -> tuple[float, int]:
    """From every room, open each door in a sibling of its own, and take the one that leads on. The reward, and how many
    doors were opened."""
    opened = 0
    await env.reset(seed=seed)
    while not (reward := await env.call_reward()):
        place = await env.checkpoint()
        async with await env.fork(DOORS - 1) as siblings:
            doors = await asyncio.gather(*(_open(one, number) for number, one in enumerate([env, *siblings])))
        opened += len(doors)
        right = next(number for number, door in enumerate(doors) if not door.structured["stuck"])
        if right:
            await env.restore(place)
            await _open(env, right)
            opened += 1
    return reward, opened


async def from_the_start(env: Environment, seed: int, most: int) -> tuple[float, int]:
    """Episodes that remember all that earlier ones found out, until so many doors were opened."""
    opened, way, wrong = 0, [], set()
    draws = random.Random(0)
    while True:
        await env.reset(seed=seed)
        guess = draws.choice([door for door in range(DOORS) if door not in wrong])
        for number in [*way, guess]:
            if opened == most:
                return await env.call_reward(), opened
            door = await _open(env, number)
            opened += 1
        if door.structured["stuck"]:
            wrong.add(guess)
        else:
            way, wrong = [*way, guess], set()
        if reward := await env.call_reward():
            return reward, opened


async def _open(env: Environment, number: int) -> ToolResult:
    return await env.call_tool("open_door", {"number": number})


async def main(seed: int = 7) -> None:
    async with Environment("maze", seed=seed) as env:
        reward, opened = await search(env, seed)
        print(f"a search that forks:      reward {reward:g} with {opened} doors opened")
        reward, opened = await from_the_start(env, seed, opened)
        print(f"episodes from the start:  reward {reward:g} with {opened} doors opened")


if __name__ == "__main__":
    asyncio.run(main())
