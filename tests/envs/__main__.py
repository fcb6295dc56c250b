"""``python -m tests.envs``: install the packages that the built-in benchmarks need, and make what tests play."""

import asyncio

from aenv.engines.process.venvs import interpreter_for
from aenv.project.builtin import builtin_root
from tests.envs import swe_tasks
from tests.envs.benchmarks import names

for name in names():
    asyncio.run(interpreter_for(builtin_root() / name, print, trusted=True))
swe_tasks.prepare()
