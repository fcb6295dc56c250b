"""Tic-tac-toe for two agents on one instance: each has its turn, its own notes and its own reward."""

from aenv import Context, register_reset, register_reward, register_tool, register_turn

PLAYERS = ("x", "o")
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
game = {"cells": [""] * 9, "notes": {}}


@register_reset
def begin():
    """An empty board."""
    game.update(cells=[""] * 9, notes={})
    return board()


@register_turn
def turn():
    """Whose turn it is: nobody's when the game is over."""
    taken = sum(map(bool, game["cells"]))
    return None if winner() or taken == 9 else PLAYERS[taken % 2]


@register_tool(agents=PLAYERS)
def place(cell: int, ctx: Context) -> str:
    """Take a cell.

    Args:
        cell: 0 to 8, row by row.
    """
    if not 0 <= cell < 9 or game["cells"][cell]:
        raise ValueError("that is no free cell")
    game["cells"][cell] = ctx.agent
    return board()


@register_tool(anytime=True)
def board() -> str:
    """The board; a dot is a free cell."""
    return "\n".join("".join(owner or "." for owner in game["cells"][row : row + 3]) for row in (0, 3, 6))


@register_tool(agents=PLAYERS, anytime=True)
def note(text: str, ctx: Context) -> str:
    """Keep a note that the other agent does not see; all that were kept.

    Args:
        text: What to keep.
    """
    kept = game["notes"].setdefault(ctx.agent, [])
    kept.append(text)
    return "\n".join(kept)


@register_tool(agents=["x"])
def concede() -> str:
    """Give the game up. Who began may."""
    game["cells"] = ["o"] * 9
    return "o has won"


@register_reward
def won(ctx: Context) -> float:
    """1 for who has won, -1 for who has lost, and 0 where nobody has."""
    return 0.0 if winner() is None else 1.0 if winner() == ctx.agent else -1.0


def winner():
    cells = game["cells"]
    return next((cells[a] for a, b, c in LINES if cells[a] and cells[a] == cells[b] == cells[c]), None)
