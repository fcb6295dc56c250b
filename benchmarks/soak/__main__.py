"""``python -m benchmarks.soak [docker|kubernetes|platform|sandbox] --seconds N``."""

from __future__ import annotations

import argparse
import asyncio
import sys

from benchmarks.soak import docker, kubernetes, platform, sandbox

RUNS = {"docker": docker.soak, "kubernetes": kubernetes.soak, "platform": platform.soak, "sandbox": sandbox.soak}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("what", nargs="?", choices=sorted(RUNS), default="platform")
    parser.add_argument("--seconds", type=float, default=600.0)
    given = parser.parse_args()
    return asyncio.run(RUNS[given.what](given.seconds))


if __name__ == "__main__":
    sys.exit(main())
