"""The agent's work as a patch, which is all of it that is judged.

The agent's directory is compared with a fresh checkout by a fresh repository, so whatever the agent did to its own one
(history, configuration, hooks, exclusions) counts for nothing.
"""

from __future__ import annotations

import fnmatch
import secrets
from pathlib import PurePosixPath
from typing import NamedTuple

from swe.rows import Row
from swe.testbed import ROOT, Testbed

MOST = 16 * 1024 * 1024
"""Bytes of a patch."""
MOST_WORK = 200 * 1024 * 1024
"""Bytes of all files of the agent's."""
_FOLDERS = frozenset({"test", "tests", "testing", "e2e"})
_FILES = ("test_*", "*_test.py", "*_tests.py", "tests.py")
_STEERING = ("conftest.py", "pytest.ini", ".pytest.ini", "sitecustomize.py", "usercustomize.py", "*.pth")
"""What a run of tests begins with, before a line of the repository runs."""
_ASIDE = "/tmp/agents-work"  # noqa: S108
_PACK = f"""
for place in /tmp {ROOT}; do
    if [ -L "$place" ] || [ ! -d "$place" ]; then rm -f "$place"; mkdir "$place" || exit 1; fi
done
chmod u+rwx /tmp 2> /dev/null
chmod -R u+rwX {ROOT} && find {ROOT} -name .git -prune -exec rm -rf {{}} + && tar -cf "$1" -C {ROOT} . && wc -c < "$1"
"""
_COMPARE = f"""
cd {_ASIDE} && export GIT_DIR={ROOT}/.git GIT_WORK_TREE={_ASIDE} &&
git add -A . && git diff --cached --no-renames --name-only -z HEAD
"""
_EXPORT = f"""
export GIT_DIR={ROOT}/.git GIT_WORK_TREE={_ASIDE} && cd {_ASIDE} &&
if [ $# -gt 0 ]; then git --literal-pathspecs reset -q HEAD -- "$@"; fi &&
git diff --cached --no-renames --no-color --no-ext-diff --no-textconv --binary HEAD > /tmp/patch.diff &&
wc -c < /tmp/patch.diff
"""


class Prediction(NamedTuple):
    """What the harness calls a prediction."""

    patch: str
    files: list[str]
    """Those that it changes."""
    left_out: list[str]
    """Those that the agent changed, and that are no part of it: tests, and what steers a run of tests."""


async def take(testbed: Testbed, row: Row) -> Prediction:
    """The agent's work. It ends all that the agent left running, and leaves nothing of it in the sandbox."""
    await testbed.end_all()
    packed = f"/tmp/work-{secrets.token_hex(8)}.tar"  # noqa: S108
    if int(await testbed.sh(_PACK, packed)) > MOST_WORK:
        return Prediction("", [], [ROOT])
    work = await testbed.second.read(packed)
    await testbed.fresh(row)
    await testbed.put(work, _ASIDE)
    changed = [name for name in (await testbed.sh(_COMPARE)).split("\0") if name]
    left_out = [name for name in changed if is_test(name) and name not in _golden(row)]
    size = int(await testbed.sh(_EXPORT, *left_out))
    if size > MOST:
        return Prediction("", [], changed)
    patch = (await testbed.second.read("/tmp/patch.diff")).decode(errors="surrogateescape")  # noqa: S108
    return Prediction(patch, [name for name in changed if name not in left_out], left_out)


def is_test(name: str) -> bool:
    """Whether a file is a test or steers tests, by the words that the benchmark goes by when it parts a pull request
    into its patch and its tests."""
    path = PurePosixPath(name)
    if _FOLDERS & set(path.parts[:-1]):
        return True
    return any(fnmatch.fnmatchcase(path.name, pattern) for pattern in (*_FILES, *_STEERING))


def _golden(row: Row) -> set[str]:
    return {line[6:].strip() for line in row.gold.splitlines() if line.startswith(("+++ b/", "--- a/"))}
