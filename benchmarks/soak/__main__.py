"""``python -m benchmarks.soak [docker|kubernetes|platform|sandbox] --seconds N``, ``rollouts --episodes N``, or
``trainings --seeds N``."""

from __future__ import annotations

import argparse
import asyncio
import sys

from benchmarks.soak import docker, kubernetes, platform, rollouts, sandbox, trainings

RUNS = {"docker": docker.soak, "kubernetes": kubernetes.soak, "platform": platform.soak, "sandbox": sandbox.soak}
ROLLOUTS, TRAININGS = "rollouts", "trainings"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("what", nargs="?", choices=sorted([*RUNS, ROLLOUTS, TRAININGS]), default="platform")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long; of those that go on for a time")
    parser.add_argument("--episodes", type=int, default=rollouts.EPISODES, help="how many; of rollouts")
    parser.add_argument("--seed", type=int, default=0, help="what is killed, and when; of rollouts")
    parser.add_argument("--seeds", type=int, default=3, help="how many; of trainings")
    parser.add_argument("--record", action="store_true", help="draw docs/images/trainings.svg; of trainings")
    given = parser.parse_args()
    if given.what == ROLLOUTS:
        return rollouts.soak(given.episodes, given.seed)
    if given.what == TRAININGS:
        return trainings.soak(given.seeds, record=given.record)
    return asyncio.run(RUNS[given.what](given.seconds))


if __name__ == "__main__":
    sys.exit(main())
