import custom_env
import pytest

from aenv import Context


@pytest.fixture(autouse=True)
def episode():
    custom_env.start(Context())
    yield
    custom_env.stop()


def test_the_same_seed_gives_the_same_episode():
    first = custom_env.reset(seed=7)
    assert len(first["observation"]) == 4
    assert custom_env.reset(seed=7) == first
    assert custom_env.reset(seed=8) != first


def test_steps_change_the_observation_and_add_up():
    before = custom_env.reset(seed=7)
    after = custom_env.step(1)
    assert after["reward"] == 1.0
    assert after["observation"] != before["observation"]
    assert custom_env.observe()["observation"] == after["observation"]
    assert custom_env.episode_return() == {"score": 1.0, "steps": 1, "over": False}


def test_an_action_outside_the_space_is_refused():
    with pytest.raises(ValueError, match="not an action"):
        custom_env.step(2)
    with pytest.raises(ValueError, match="not an action"):
        custom_env.step(0.5)


def test_an_episode_ends_and_begins_again():
    custom_env.reset(seed=7)
    while not custom_env.step(1)["terminated"]:
        pass
    with pytest.raises(ValueError, match="over"):
        custom_env.step(1)
    custom_env.restart(seed=7)
    assert custom_env.episode_return() == {"score": 0.0, "steps": 0, "over": False}
