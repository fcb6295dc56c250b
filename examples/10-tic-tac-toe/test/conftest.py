"""Lets the tests import the modules in src/ as the sandbox does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))
