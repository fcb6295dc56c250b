"""``python -m tests.peers``: make the virtual environments that these tests need."""

from benchmarks import venvs

from tests.peers.support import requirements

for name in ("mcp1", "mcp2"):
    venvs.python(requirements(name), with_package=True)
for name in ("seaweed", "wild"):
    venvs.python(requirements(name))
if venvs.another("3.12"):
    venvs.python(requirements("harbor"), with_package=True, version="3.12")
