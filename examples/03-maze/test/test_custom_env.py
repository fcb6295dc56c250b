import custom_env
import pytest


def test_one_door_of_each_room_leads_on_and_the_last_leads_out():
    custom_env.begin(seed=1)
    for room, door in enumerate(list(custom_env.now["right"]), start=1):
        assert custom_env.out() == 0.0
        assert custom_env.open_door(door) == {"room": room, "stuck": False}
    assert custom_env.out() == 1.0


def test_behind_every_other_there_is_no_way_back():
    custom_env.begin(seed=1)
    wrong = (custom_env.now["right"][0] + 1) % custom_env.DOORS
    assert custom_env.open_door(wrong) == {"room": 0, "stuck": True}
    with pytest.raises(ValueError, match="no door"):
        custom_env.open_door(0)
    custom_env.begin(seed=1)
    assert custom_env.open_door(custom_env.now["right"][0])["room"] == 1


def test_a_door_that_is_not_there():
    custom_env.begin()
    with pytest.raises(ValueError, match="doors 0 to 3"):
        custom_env.open_door(4)
