"""``aenv validate`` says whether a project is preloaded, and why not."""

import time

import psutil
import pytest

from aenv import project

TOOL = '''
from aenv import register_reward, register_tool

@register_tool
def hello() -> str:
    """Greet."""
    return "hello"

@register_reward
def reward() -> float:
    """Score."""
    return 1.0
'''
CLEAN = "preloaded: instances fork from the imported project"


def ended(pid):
    """Whether a process is over, or will be in a moment; one that nobody has collected yet is."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
    return False


@pytest.fixture
def row(aenv, here):
    """Write a project and return its row of ``validate``, with the exit code."""

    def row(source=TOOL, *options, **deploy):
        root = here / "demo"
        if not root.exists():
            project.scaffold("demo", here)
        (root / "src" / "custom_env.py").write_text(source)
        project.write(project.read(root), {"deployConfig": deploy})
        answer = aenv("validate", "-w", "demo", "-o", "json", *options)
        (found,) = [row for row in answer.data["checks"] if row["check"] == "preload"]
        return answer.code, found["status"], found["detail"].splitlines(), found["fix"]

    return row


def test_a_clean_import_is_preloaded(row):
    assert row() == (0, "ok", [CLEAN], "")
    assert row(preload=True) == (0, "ok", [CLEAN], "")


def test_preloading_can_be_turned_off(row):
    assert row("import time\nNOW = time.time()\n" + TOOL, preload=False)[1:3] == (
        "ok",
        ["off: each instance imports the project"],
    )


def test_what_stands_against_it_is_listed(row):
    source = "import os, time\nNOW = time.time()\nMODE = os.environ.get('MODE')\n" + TOOL
    reasons = ["reads the clock (time.time) at src/custom_env.py:2", "reads the variable MODE at src/custom_env.py:3"]
    code, status, (head, *listed), fix = row(source)
    assert (code, status, listed) == (0, "ok", reasons)
    assert head.startswith("not preloaded: ")
    assert "@register_setup" in fix
    code, status, (head, *listed), fix = row(source, preload=True)
    assert (code, status, listed) == (0, "warn", reasons)
    assert head.startswith("preloaded, as config.json says")
    assert '"auto"' in fix


def test_a_long_list_is_cut(row):
    detail = row("import time\n" + "NOW = time.time()\n" * 20 + TOOL)[2]
    assert len(detail) == 10
    assert detail[-1] == "and 12 more"


def test_variables_of_the_config_are_set(row):
    source = "import os\nif os.environ['MODE'] != 'fast': raise RuntimeError\n" + TOOL
    assert row(source, environmentVariables={"MODE": "fast"})[2][1:] == [
        "reads the variable MODE at src/custom_env.py:2"
    ]


def test_what_the_import_prints_is_not_taken_for_the_answer(row):
    assert row("import os\nprint('{}')\nos.write(1, b'[]')\n" + TOOL) == (0, "ok", [CLEAN], "")


def test_an_import_that_ends_the_process_is_a_warning(row):
    # The second import in a process of its own, the watched one, is the one that ends.
    source = "import os, pathlib\nmark = pathlib.Path(__file__).with_name('mark')\n"
    source += "os._exit(3) if mark.exists() else mark.touch()\n" + TOOL
    code, status, detail, fix = row(source)
    assert (code, status, detail) == (0, "warn", ["the import could not be watched: it ended with exit code 3"])
    assert "preload" in fix


def test_an_import_that_does_not_end_is_a_warning_and_is_ended(row, here):
    source = "import os, pathlib, time\nmark = pathlib.Path(__file__).with_name('mark')\n"
    source += "if mark.exists():\n    mark.write_text(str(os.getpid()))\n    time.sleep(600)\nmark.touch()\n" + TOOL
    assert row(source, "--startup-timeout", "8")[1:3] == (
        "warn",
        ["the import could not be watched: it took longer than 8 s"],
    )
    assert ended(int((here / "demo" / "src" / "mark").read_text()))


def test_what_the_import_leaves_running_is_ended(row, here):
    source = "import pathlib, subprocess\nchild = subprocess.Popen(['sleep', '600'])\n"
    source += "pathlib.Path(__file__).with_name('child').write_text(str(child.pid))\n" + TOOL
    assert "starts a process (subprocess.fork_exec) at src/custom_env.py:2" in row(source)[2]
    pid = int((here / "demo" / "src" / "child").read_text())
    assert ended(pid)
