"""The same environment on OpenEnv, one process: ``python -m benchmarks.servers.openenv_server PORT [MODE ...]``.

Every WebSocket is a session with an ``Environment`` of its own. A turn adds two numbers, and the last one is scored.
It is written and served as ``openenv init`` writes and serves one. With the mode ``tuned`` its methods are
asynchronous, which OpenEnv runs on the event loop instead of in a thread for each session, what is left for threads has
one for all of them, and messages are not packed, which gains nothing where they are this small. With ``cartpole`` it is
Gymnasium's pole on a cart.
"""

import sys
from typing import Any

import gymnasium
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

SESSIONS = 4096
"""How many may be open at once: more than are measured, since OpenEnv counts one until it is closed for good."""


class Add(Action):
    a: int
    b: int


class Sum(Observation):
    result: int | None = None


class Adding(Environment[Add, Sum, State]):
    """Add two numbers for a number of turns; the score, as the last reward, is what the last of them gave."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._turns = 0
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, turns: int = 10, **_: Any) -> Sum:
        self._turns = turns
        self._state = State(episode_id=episode_id, step_count=0)
        return Sum()

    def step(self, action: Add, timeout_s: float | None = None, **_: Any) -> Sum:
        self._state.step_count += 1
        result = action.a + action.b
        if self._state.step_count < self._turns:
            return Sum(result=result)
        return Sum(result=result, reward=result, done=True)

    @property
    def state(self) -> State:
        return self._state


class Tuned(Adding):
    """The same, with all that makes it faster."""

    REQUIRES_SINGLE_THREAD_EXECUTOR = True

    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, turns: int = 10, **_: Any
    ) -> Sum:
        return self.reset(seed, episode_id, turns)

    async def step_async(self, action: Add, timeout_s: float | None = None, **_: Any) -> Sum:
        return self.step(action)


class Press(Action):
    press: int


class Cart(Observation):
    cart: list[float]


class Pole(Environment[Press, Cart, State]):
    """Gymnasium's pole on a cart."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._env = gymnasium.make("CartPole-v1")
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Cart:
        self._state = State(episode_id=episode_id, step_count=0)
        observation, _info = self._env.reset(seed=seed)
        return Cart(cart=observation.tolist())

    def step(self, action: Press, timeout_s: float | None = None, **_: Any) -> Cart:
        self._state.step_count += 1
        observation, reward, terminated, truncated, _info = self._env.step(action.press)
        return Cart(cart=observation.tolist(), reward=float(reward), done=terminated or truncated)

    @property
    def state(self) -> State:
        return self._state


class TunedPole(Pole):
    """The same, with all that makes it faster."""

    REQUIRES_SINGLE_THREAD_EXECUTOR = True

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Cart:
        return self.reset(seed, episode_id)

    async def step_async(self, action: Press, timeout_s: float | None = None, **_: Any) -> Cart:
        return self.step(action)


if __name__ == "__main__":
    tuned = "tuned" in sys.argv
    adding, pole = (Tuned, TunedPole) if tuned else (Adding, Pole)
    served = (pole, Press, Cart) if "cartpole" in sys.argv else (adding, Add, Sum)
    app = create_app(*served, env_name="bench", max_concurrent_envs=SESSIONS)
    # Quiet, so that no side pays for a line of log on each session.
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=int(sys.argv[1]),
        log_level="error",
        access_log=False,
        ws_per_message_deflate=not tuned,
    )
