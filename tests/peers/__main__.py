"""``python -m tests.peers``: make the virtual environments that these tests need."""

import asyncio

from benchmarks import venvs

from aenv.engines.process.venvs import interpreter_for
from tests.peers.support import MINI_SWE, requirements

for name in ("mcp1", "mcp2", "sb3"):
    venvs.python(requirements(name), with_package=True)
for name in ("models", "seaweed", "wild"):
    venvs.python(requirements(name))
if venvs.another("3.12"):
    venvs.python(requirements("harbor"), with_package=True, version="3.12")
asyncio.run(interpreter_for(MINI_SWE, print))
