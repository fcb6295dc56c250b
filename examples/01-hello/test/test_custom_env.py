import asyncio

import custom_env
import pytest

from aenv import Context


@pytest.fixture(autouse=True)
def episode():
    custom_env.again(seed=7)


def dig(row, column):
    return asyncio.run(custom_env.dig(row, column))


def test_the_seed_decides_where_the_treasure_is():
    first = custom_env.reveal()
    custom_env.again(seed=7)
    assert custom_env.reveal() == first
    places = set()
    for seed in range(20):
        custom_env.again(seed)
        places.add(tuple(custom_env.reveal().values()))
    assert len(places) > 10


def test_digging_tells_the_distance():
    place = custom_env.reveal()
    beside = (place["row"], place["column"] - 1 if place["column"] else 1)
    assert dig(*beside) == {"found": False, "distance": 1, "digs_left": custom_env.DIGS - 1}
    assert dig(**place)["found"]
    assert custom_env.look()["holes"] == [beside, (place["row"], place["column"])]


def test_the_sea_costs_nothing():
    with pytest.raises(ValueError, match="in the sea"):
        dig(custom_env.SIZE, 0)
    assert custom_env.look()["digs_left"] == custom_env.DIGS


def test_a_survey_names_the_half():
    half = custom_env.survey(Context())["half"]
    assert half == ("north" if custom_env.reveal()["row"] < custom_env.SIZE // 2 else "south")
    assert custom_env.look()["digs_left"] == custom_env.DIGS - custom_env.SURVEY_COST


def test_the_reward_counts_the_digs():
    assert custom_env.treasure_found()["score"] == 0.0
    dig(**custom_env.reveal())
    assert custom_env.treasure_found()["score"] == 1.0
    with pytest.raises(ValueError, match="nothing left to do"):
        dig(0, 0)


def test_digs_run_out():
    place = custom_env.reveal()
    other = (place["row"] + 1) % custom_env.SIZE
    for _ in range(custom_env.DIGS):
        dig(other, 0)
    with pytest.raises(ValueError, match="0 are left"):
        dig(other, 0)
    assert custom_env.treasure_found()["score"] == 0.0
