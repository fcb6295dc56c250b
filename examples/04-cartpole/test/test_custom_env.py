import gymnasium

from aenv import SyncEnvironment


def test_it_is_the_pole_on_a_cart():
    own = gymnasium.make("CartPole-v1")
    first, _ = own.reset(seed=1)
    with SyncEnvironment("cartpole") as env:
        assert env.reset(seed=1)["observation"] == first.tolist()
        (step,) = env.call_function("gymnasium_play", {"moves": [[0, "step", 1]]})
        assert step["observation"] == own.step(1)[0].tolist()
        assert env.call_reward() == {"score": 1.0, "steps": 1, "over": False}
