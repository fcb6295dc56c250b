"""The real ``harbor`` command on our process engine: the same tasks, and the same rewards as terminal-bench gives."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from benchmarks import venvs

from aenv import Unsupported, agent
from aenv.project.builtin import builtin_root
from tests.peers.support import requirements

TASKS = builtin_root() / "terminal-bench" / "tasks"
CLASS = "aenv.integrations.harbor:AenvEnvironment"
ALONE = """#!/bin/bash
others=$(tail -n +3 /proc/net/dev | grep -vc ' lo:')
[ -s /app/done ] && [ "$others" = "$(cat /app/wanted)" ]
echo $((! $?)) > /logs/verifier/reward.txt
"""
pytestmark = pytest.mark.timeout(300)


class Harbor:
    """The command, with a home of its own."""

    def __init__(self, folder: Path) -> None:
        wanted = requirements("harbor")
        if not venvs.is_made(wanted, with_package=True, version="3.12"):
            pytest.skip("needs the virtual environment harbor: run 'make components', with Python 3.12")
        self._program = venvs.python(wanted, with_package=True, version="3.12").with_name("harbor")
        self._folder = folder
        quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HARBOR_TELEMETRY": "0"}
        taken = {name: value for name, value in os.environ.items() if not name.startswith(("AENV_", "DUMMY_"))}
        self._variables = {**taken, **quiet, "AENV_HOME": str(folder / "home"), "HOME": str(folder)}

    def run(self, tasks: Path, player: str) -> tuple[dict[str, float], dict[str, Any]]:
        """The reward of each task, and what was raised instead of one."""
        name = f"{tasks.name}-{player}"
        command = [self._program, "run", "-p", tasks, "-a", player, "-e", CLASS, "-o", self._folder, "-n", "3", "-y"]
        done = subprocess.run(
            [*command, "--job-name", name], env=self._variables, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stdout + done.stderr
        rewards, failures = {}, {}
        for path in sorted((self._folder / name).glob("*/result.json")):
            found = json.loads(path.read_text())
            task = found["task_name"].rpartition("/")[2]
            if found["exception_info"]:
                failures[task] = found["exception_info"]["exception_message"]
            else:
                rewards[task] = found["verifier_result"]["rewards"]["reward"]
        return rewards, failures


@pytest.fixture(scope="module")
def harbor():
    folder = Path(tempfile.mkdtemp(prefix="aeh-", dir="/tmp"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AENV_HOME", str(folder / "home"))
        try:
            agent.binary()
        except Unsupported as exc:
            pytest.skip(f"needs the agent of second sandboxes: {exc.message}")
    yield Harbor(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(("player", "reward"), [("oracle", 1.0), ("nop", 0.0)])
def test_the_rewards_are_those_of_terminal_bench(harbor, player, reward):
    names = {path.parent.name for path in TASKS.glob("*/task.toml")}
    assert len(names) >= 6
    assert harbor.run(TASKS, player) == (dict.fromkeys(names, reward), {})


def test_what_a_task_asks_for_is_given_or_refused(harbor, tmp_path):
    """Who may not reach everybody has only the loopback; what takes an image is not tried without one."""

    def task(name: str, dockerfile: str, toml: str = "") -> None:
        for place, text in {
            "task.toml": f'schema_version = "1.4"\n[task]\nname = "aenv/{name}"\n{toml}',
            "instruction.md": "Do it.",
            "environment/Dockerfile": dockerfile,
            "environment/files/a file": "7",
            "solution/solve.sh": "#!/bin/bash\necho $MADE-$GIVEN > done\n",
            "tests/test.sh": ALONE,
        }.items():
            path = tmp_path / "asking" / name / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    made = 'COPY files .\nRUN grep -q 7 "a file" && echo 0 > wanted\n'
    plain = f"FROM debian:bookworm-slim\nENV MADE=yes\nWORKDIR /app\n{made}"
    task("shut", plain, '[environment]\nnetwork_mode = "no-network"\n[solution.env]\nGIVEN = "too"\n')
    task("installs", "FROM debian\nRUN apt-get install -y cowsay\n")
    task("listed", plain, '[environment]\nnetwork_mode = "allowlist"\nallowed_hosts = ["example.org"]\n')
    rewards, failures = harbor.run(tmp_path / "asking", "oracle")
    assert rewards == {"shut": 1.0, "listed": 1.0}
    assert "line 2 of its Dockerfile: RUN installs by apt-get" in failures["installs"]
    assert list(failures) == ["installs"]
