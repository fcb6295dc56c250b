"""``python -m aenv.main PATH``: the name under which existing Dockerfiles start the runtime, reachable from outside."""

import sys

from aenv.runtime.__main__ import main

if __name__ == "__main__":
    sys.exit(main(host="0.0.0.0"))  # noqa: S104 - in a container; a token is asked for
