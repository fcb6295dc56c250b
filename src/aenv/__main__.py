"""``python -m aenv``: the ``aenv`` command, of this interpreter."""

import sys

from aenv.cli import main

if __name__ == "__main__":
    sys.exit(main())
