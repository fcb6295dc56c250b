import custom_env
import pytest

from aenv import Context


def play(*cells):
    custom_env.begin()
    for cell in cells:
        custom_env.place(cell, Context(agent=custom_env.turn()))


def test_a_line_wins_and_the_game_is_over():
    play(0, 3, 1, 4, 2)
    assert custom_env.turn() is None
    assert [custom_env.won(Context(agent=name)) for name in custom_env.PLAYERS] == [1.0, -1.0]


def test_a_full_board_is_nobodys():
    play(0, 1, 2, 4, 3, 5, 7, 6, 8)
    assert custom_env.turn() is None
    assert custom_env.won(Context(agent="x")) == 0.0


def test_a_cell_is_taken_once():
    play(4)
    with pytest.raises(ValueError, match="no free cell"):
        custom_env.place(4, Context(agent="o"))
