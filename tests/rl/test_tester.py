"""examples/08-tester: an agent that tests another one, which is part of its environment."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT

EXAMPLE = ROOT / "examples" / "08-tester"


def test_it_finds_every_fault(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("AENV_", "DUMMY_"))}
    done = subprocess.run(
        (sys.executable, str(EXAMPLE / "tester.py")),
        env={**env, "AENV_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = re.findall(r"^desk \d: (.+), \d turns, reward 1$", done.stdout, re.MULTILINE)
    assert len(told) == 8
    assert set(told) == {"none", "tells anybody", "forgets", "makes things up"}
