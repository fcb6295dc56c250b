"""What a task's own verifier says, once the agent is cut off.

In the order of what is done: no process of the agent's is left; the programs that the verifier runs by are what they
were, and so are their libraries; its tests and the place of its verdict are made anew; and it runs with variables and a
home that no agent wrote.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
from collections.abc import Mapping
from typing import Any

from aenv.errors import AEnvError, NotFound, StorageFull
from terminal_bench.box import PATH, Box
from terminal_bench.files import put
from terminal_bench.tasks import HarborTask

TESTS, LOGS, VERDICTS = "/tests", "/logs/verifier", ("reward.json", "reward.txt")
_TIME = 600.0
_OUTPUT = 8000
"""Characters of what the verifier printed that are kept, from its end."""
_CLEAR = """
there() {  # a directory that can be written, whatever was in its place
    [ -d "$1" ] && [ ! -L "$1" ] || rm -rf -- "$1"
    mkdir -p "$1" && { [ -w "$1" ] && [ -x "$1" ] || chmod u+rwx "$1"; }
}
there /tmp && there /logs && { [ -d "$1" ] && [ -x "$1" ] || there "$1"; } || exit 1
shift
for place in "$@"; do
    [ -L "$place" ] || chmod -R u+rwX -- "$place" 2> /dev/null
    rm -rf -- "$place" || exit 1
done
mkdir -p /logs/verifier "$1"
"""
"""Its first arguments are the work directory and the verifier's home; all after the first are removed."""
_PACK = 'tar -cf "$0" -C / --ignore-failed-read -- "$@" 2> /dev/null; true'


_MOST = 20
"""Files that were replaced which are named."""


async def verify(
    box: Box, task: HarborTask, given: Mapping[str, str], *, keep: bool, packages: bool = True
) -> dict[str, Any]:
    """The score, and what it consists of. ``keep``: leave what the agent left running as it is. ``packages``: those for
    Python that were there must be what they were."""
    replaced = await box.replaced()
    if not replaced and not keep:
        await box.end_all()
        replaced = await box.replaced()  # whatever was changed before the end of the last process
    replaced = replaced or await box.bent(packages=packages)
    if replaced:
        return {"score": 0.0, "replaced": replaced[:_MOST], "why": "programs that the verifier runs by were replaced"}
    if task.separate:
        await _move(box, task)
    home = f"/tmp/verifier-{secrets.token_hex(8)}"  # noqa: S108
    try:
        await _sh(box, _CLEAR, box.workdir or "/", home, LOGS, *(() if task.own_tests else (TESTS,)))
        if not task.own_tests:
            await put(box.second, task.directory / "tests", TESTS)
    except StorageFull:
        return {"score": 0.0, "why": "the agent left no room for the verifier"}
    variables = box.variables | task.variables(given, "verifier") | {"PATH": PATH, "HOME": home}
    limit = float(task.verifier.get("timeout_sec", _TIME))
    script = f"{TESTS}/test.sh"
    await _sh(box, 'chmod +x "$1"', script)
    done = await box.second.exec([script], cwd=box.workdir, env=variables, timeout=limit)
    if done.timed_out:
        raise AEnvError(f"the verifier of {task.id} was not done within {limit:g} s")
    rewards = await _rewards(box, task, done.stdout + done.stderr)
    return {
        "score": _score(task, rewards),
        "rewards": rewards,
        "output": (done.stdout + done.stderr)[-_OUTPUT:],
        "environment": "separate" if task.separate else "shared",
    }


async def _move(box: Box, task: HarborTask) -> None:
    """A fresh environment, with nothing of the agent's but what the task calls artifacts."""
    for hook in task.verifier.get("collect", ()):
        within = float(hook.get("timeout_sec", 60))
        await box.second.exec(hook["command"], cwd=box.workdir, env=box.variables, timeout=within)
    packed = f"/tmp/artifacts-{secrets.token_hex(8)}.tar"  # noqa: S108
    wanted = [path.lstrip("/") for path in task.artifacts]
    await box.second.exec(["/bin/sh", "-c", _PACK, packed, *wanted], timeout=_TIME, env={"PATH": PATH})
    data = await box.second.read(packed)
    await box.again(task)
    await box.second.write(packed, data)
    await _sh(box, 'tar -xf "$1" -C / && rm "$1"', packed)


async def _sh(box: Box, script: str, *arguments: str) -> None:
    done = await box.second.exec(["/bin/sh", "-c", script, "sh", *arguments], env={"PATH": PATH}, timeout=_TIME)
    if done.returncode:
        kind = StorageFull if os.strerror(errno.ENOSPC) in done.stderr else AEnvError
        raise kind(f"the verifier cannot be made ready: {done.stderr[-_OUTPUT:].strip()}")


async def _rewards(box: Box, task: HarborTask, printed: str) -> dict[str, float]:
    for name in VERDICTS:
        try:
            text = (await box.second.read(f"{LOGS}/{name}", most=65536)).decode()
        except NotFound:
            continue
        try:
            found = json.loads(text) if name.endswith(".json") else float(text)
            named = found if isinstance(found, dict) else {"reward": found}
            return {key: _number(value) for key, value in named.items()}
        except (ValueError, TypeError) as exc:
            raise AEnvError(f"the verifier of {task.id} wrote no numbers to {LOGS}/{name}: {exc}") from exc
    said = f"; it printed: {printed[-500:].strip()}" if printed.strip() else ""
    raise AEnvError(f"the verifier of {task.id} wrote neither {' nor '.join(VERDICTS)} to {LOGS}{said}")


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def _score(task: HarborTask, rewards: Mapping[str, float]) -> float:
    if "reward" in rewards:
        return rewards["reward"]
    if len(rewards) != 1:
        raise AEnvError(f"the verifier of {task.id} gave {', '.join(rewards) or 'nothing'}, and no 'reward'")
    return next(iter(rewards.values()))
