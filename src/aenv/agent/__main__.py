"""``python -m aenv.agent PATH``: put the agent for this kind of machine there, for a second container to run."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from aenv.agent import binary
from aenv.errors import AEnvError


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m aenv.agent PATH\n")
        return 2
    target = Path(arguments[0])
    try:
        shutil.copyfile(binary(), target)
        target.chmod(0o755)
    except (AEnvError, OSError) as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
