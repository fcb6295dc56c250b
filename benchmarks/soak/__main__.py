"""``python -m benchmarks.soak [docker|kubernetes|platform|sandbox] --seconds N``, or ``rollouts --episodes N``."""

from __future__ import annotations

import argparse
import asyncio
import sys

from benchmarks.soak import docker, kubernetes, platform, rollouts, sandbox

RUNS = {"docker": docker.soak, "kubernetes": kubernetes.soak, "platform": platform.soak, "sandbox": sandbox.soak}
ROLLOUTS = "rollouts"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("what", nargs="?", choices=sorted([*RUNS, ROLLOUTS]), default="platform")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long; of all but rollouts")
    parser.add_argument("--episodes", type=int, default=rollouts.EPISODES, help="how many; of rollouts")
    parser.add_argument("--seed", type=int, default=0, help="what is killed, and when; of rollouts")
    given = parser.parse_args()
    if given.what == ROLLOUTS:
        return rollouts.soak(given.episodes, given.seed)
    return asyncio.run(RUNS[given.what](given.seconds))


if __name__ == "__main__":
    sys.exit(main())
