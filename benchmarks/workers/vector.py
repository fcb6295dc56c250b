"""Steps of a vector of environments, in an example's folder: ``python -m benchmarks.workers.vector [PER_INSTANCE]``.

Without a number they are Gymnasium's own, a process for each.

A round is a line ``{"steps": n}``, answered with the seconds of the ``wall`` and of this process's ``cpu``.
"""

import json
import sys
import time
from typing import Any

import gymnasium

from aenv.integrations.gymnasium import AenvVectorEnv

ENVS = 64
SEED = 1


def main(per_instance: int) -> None:
    """Step until stdin ends."""
    envs: Any = (
        AenvVectorEnv("cartpole", ENVS, per_instance=per_instance)
        if per_instance
        else gymnasium.vector.AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * ENVS)
    )
    try:
        _answer({"ready": True})
        while line := sys.stdin.readline():
            envs.reset(seed=SEED)
            envs.action_space.seed(SEED)
            actions = [envs.action_space.sample() for _ in range(json.loads(line)["steps"])]
            wall, cpu = time.perf_counter(), time.process_time()
            for action in actions:
                envs.step(action)
            _answer({"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu})
    finally:
        envs.close()


def _answer(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
