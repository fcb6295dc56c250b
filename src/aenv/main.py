"""``python -m aenv.main PATH``: the name under which existing Dockerfiles start the runtime."""

import sys

from aenv.runtime.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
