"""The built-in mini-terminal in a real runtime: whatever a command does, the next one works and answers truly."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from aenv import Environment, Invalid, Unsupported, attach, project
from aenv.project import scaffold
from aenv.project.builtin import builtin, builtin_names, builtin_root
from tests.support import sandbox

PROJECT = builtin_root() / "mini-terminal"
MARK = re.compile(r"\n\[\.\.\. (\d+) bytes left out \.\.\.\]\n")


@contextlib.contextmanager
def served(folder):
    """A sandbox whose work directory and temporary files are its own."""
    work, temporary = folder / "work", folder / "tmp"
    work.mkdir()
    temporary.mkdir()
    with contextlib.chdir(work):
        running = contextlib.ExitStack()
        found = running.enter_context(sandbox(PROJECT, variables={"TMPDIR": str(temporary), "GIVEN": "by the owner"}))
    with running:
        yield found, work, temporary


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with served(tmp_path_factory.mktemp("terminal")) as found:
        yield found


class Terminal:
    """An environment, with its answers as dicts."""

    def __init__(self, env, work):
        self.env = env
        self.work = work

    async def run(self, command, timeout=30.0):
        result = await self.env.call_tool("execute_command", {"command": command, "timeout": timeout}, timeout=60)
        assert not result.is_error, result.text
        return result.structured

    async def out(self, command, timeout=30.0):
        answer = await self.run(command, timeout)
        assert answer["output"][1] is True, answer
        return answer["stdout"]

    async def fail(self, tool, **arguments):
        """The message of a call that must fail as a tool, not as a sandbox."""
        result = await self.env.call_tool(tool, arguments)
        assert result.is_error
        return result.text

    async def tool(self, name, **arguments):
        result = await self.env.call_tool(name, arguments)
        assert not result.is_error, result.text
        return result.structured

    async def score(self, *checks):
        return await self.env.call_reward({"checks": list(checks)})


@pytest.fixture
async def terminal(shared):
    """The shared sandbox after a reset, in a directory for this test."""
    running, work, _ = shared
    async with Environment("mini-terminal@1.0.1", provision=attach(running.url)) as env:
        found = await env.reset()
        assert found["processes_ended"] is True
        terminal = Terminal(env, Path(tempfile.mkdtemp(dir=work)))
        await terminal.run(f"cd {terminal.work}")
        yield terminal


def with_argument(text):
    """The processes that were given this argument."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if text in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def began_in_an_earlier_tick(process):
    """The system tells by ticks when a process began: what began in the tick of a command counts as part of it."""
    began = int(Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return began < int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


async def until(condition, patience=20.0):
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        await asyncio.sleep(0.02)


@pytest.fixture
def number(request):
    """An argument for sleep by which a test's own processes are known."""
    return f"9{abs(hash(request.node.nodeid)) % 10**9}.{os.getpid()}"


# What it answers


async def test_the_answer_begins_as_the_guide_shows(terminal):
    result = await terminal.env.call_tool("execute_command", {"command": "echo helloworld", "timeout": 5})
    assert result.text.startswith('{"output":["helloworld\\n",true],"returncode":0')
    assert result.structured == {
        "output": ["helloworld\n", True],
        "returncode": 0,
        "stdout": "helloworld\n",
        "stderr": "",
        "truncated": False,
        "note": "",
    }


async def test_the_tools(terminal):
    tools = {tool["name"].rpartition("/")[2]: tool for tool in await terminal.env.list_tools()}
    assert list(tools) == ["execute_command", "read_file", "write_file", "list_files"]
    schema = tools["execute_command"]["inputSchema"]
    assert schema["required"] == ["command"]
    assert schema["properties"]["timeout"]["default"] == 60
    assert set(schema["properties"]) == {"command", "timeout"}


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("true", 0),
        ("false", 1),
        ("(exit 200)", 200),
        ("nosuchcommand", 127),
        ("/", 126),
        ("sh -c 'kill -9 $$'", 137),
        ("false | true", 0),
        ("", 0),
        ("# nothing", 0),
        ("   \n\n", 0),
    ],
)
async def test_the_return_code(terminal, command, code):
    await terminal.run("sh -c 'exit 42'")
    assert (await terminal.run(command))["returncode"] == code


async def test_stdout_and_stderr_are_apart_and_together(terminal):
    answer = await terminal.run("echo a; echo b >&2; printf c; echo d >&2")
    assert answer["stdout"] == "a\nc"
    assert answer["stderr"] == "b\nd\n"
    assert answer["output"] == ["a\nc\nb\nd\n", True]


async def test_output_without_a_newline_at_its_end(terminal):
    assert (await terminal.run("printf x"))["output"] == ["x", True]
    assert await terminal.out("echo next") == "next\n"


@pytest.mark.parametrize(
    "text",
    ["it's", 'say "x"', "back\\slash \\n", "$HOME `x` $(y)", "tab\there", "é ü 漢 🙂", "\x01\x7f\r", "a!b", "%s %d"],
)
async def test_every_character_arrives(terminal, text):
    quoted = "'" + text.replace("'", "'\\''") + "'"
    assert await terminal.out(f"printf %s {quoted}") == text


async def test_many_lines_and_here_documents(terminal):
    command = "for i in 1 2; do\n  echo $i\ndone\ncat <<'END' > file\n'quoted' $not\n\n  kept\nEND\ncat file"
    assert await terminal.out(command) == "1\n2\n'quoted' $not\n\n  kept\n"


async def test_lines_are_counted_from_the_command_on(terminal):
    for _ in range(3):
        assert (await terminal.run("true\nnosuch"))["stderr"] == "bash: line 2: nosuch: command not found\n"


async def test_standard_input_is_empty(terminal):
    assert await terminal.out("cat; read x; echo $?; wc -c") == "1\n0\n"


async def test_binary_output(terminal):
    answer = await terminal.run(r"printf 'a\377\376b\0c'; printf 'x\300' >&2")
    assert answer["stdout"] == "a\ufffd\ufffdb\0c"
    assert answer["stderr"] == "x\ufffd"
    assert "stdout had bytes that are not UTF-8" in answer["note"]
    assert "stderr had bytes that are not UTF-8" in answer["note"]


async def test_ten_megabytes_are_bounded(terminal):
    answer = await terminal.run("echo first; head -c 10000000 /dev/zero | tr '\\0' x; echo; echo last; echo no >&2")
    assert answer["truncated"] is True
    assert answer["returncode"] == 0
    assert "stdout was too long" in answer["note"]
    text = answer["stdout"]
    assert text.startswith("first\nxxx")
    assert text.endswith("xxx\nlast\n")
    left_out = MARK.search(text)
    assert len(MARK.sub("", text)) + int(left_out[1]) == 10_000_000 + len("first\n\nlast\n")
    assert len(text) < 70_000
    assert answer["stderr"] == "no\n"


async def test_a_cut_does_not_split_characters(terminal):
    answer = await terminal.run("printf 'x%.0s' 1; yes é | head -n 200000 | tr -d '\\n'")
    assert answer["truncated"] is True
    assert "\ufffd" not in answer["stdout"]
    assert "UTF-8" not in answer["note"]


async def test_memory_stays_bounded_while_reading(terminal, shared):
    runtime = psutil.Process(shared[0].process.pid)
    await terminal.run("true")
    before = runtime.memory_info().rss
    answer = await terminal.run("head -c 300000000 /dev/zero")
    assert int(MARK.search(answer["stdout"])[1]) > 299_000_000
    assert runtime.memory_info().rss - before < 50_000_000


async def test_a_command_cannot_answer_for_the_shell(terminal):
    """Answers of the shell travel where no program can print."""
    await terminal.run(r"printf 'D\0007\0/\0\0'; printf 'D\0007\0/\0\0' >&2; declare -p; ls -l /proc/self/fd")
    answer = await terminal.run(r"printf 'D\0000\0/\0\0B\0X\0'; (exit 5)")
    assert answer["returncode"] == 5
    assert await terminal.out("pwd") == f"{terminal.work}\n"
    shown = await terminal.out("ls /proc/self/fd | wc -w")
    assert shown == "4\n"  # the three, and the one that lists


async def test_a_large_command(terminal):
    text = "x" * 300_000
    assert await terminal.out(f"cat > big <<'END'\n{text}\nEND\nwc -c < big") == "300001\n"


async def test_what_cannot_be_a_command(terminal):
    assert "NUL" in await terminal.fail("execute_command", command="echo a\0b")
    assert "write_file" in await terminal.fail("execute_command", command="x" * 1_100_000)
    for timeout in (0, -1):
        assert "timeout" in await terminal.fail("execute_command", command="true", timeout=timeout)
    assert "timeout" in await terminal.fail("execute_command", command="true", timeout="soon")
    assert "command" in await terminal.fail("execute_command")
    assert await terminal.out("echo well") == "well\n"


# What stays from one command to the next


async def test_the_shell_stays(terminal):
    first = await terminal.out("echo $$")
    await terminal.run("mkdir inner; cd inner; A=1; export B='two words'; f() { echo f $1; }; alias hi='echo hello'")
    await terminal.run("declare -A map=([key]=value); shopt -s extglob; set -o pipefail; umask 077")
    assert await terminal.out("basename $PWD; echo $A; sh -c 'echo \"$B\"'; f 3; hi; echo ${map[key]}; umask") == (
        "inner\n1\ntwo words\nf 3\nhello\nvalue\n0077\n"
    )
    assert (await terminal.run("false | true"))["returncode"] == 1
    assert await terminal.out("echo $?") == "1\n"
    assert await terminal.out("echo $$") == first


async def test_the_owners_variables_are_there_and_the_runtimes_are_not(terminal):
    shown = await terminal.out("echo $GIVEN; env")
    assert shown.startswith("by the owner\n")
    assert "AENV_" not in shown


async def test_descriptors_of_the_command_stay_but_its_output_is_its_own(terminal):
    await terminal.run("echo line > file; exec 5<file; exec >elsewhere 2>&1; echo lost")
    assert await terminal.out("read -u 5 x; echo $x; cat elsewhere") == "line\nlost\n"
    await terminal.run("exec 0<&- 1>&- 2>&-")
    assert await terminal.out("echo back") == "back\n"


async def test_calls_at_once_run_one_after_another(terminal):
    await terminal.run("echo 0 > count")
    step = "n=$(cat count); sleep 0.02; echo $((n + 1)) > count"
    await asyncio.gather(*(terminal.run(step) for _ in range(8)))
    assert await terminal.out("cat count") == "8\n"


# Mistakes and odd settings


@pytest.mark.parametrize(
    "command",
    [
        'echo "a',
        "echo 'a",
        "if true; then",
        "fi",
        ")",
        "echo $(",
        "echo ${",
        "f() {",
        "cat <<END\nx",
        "echo `",
        "((",
        "&&",
    ],
)
async def test_a_mistake_does_not_wedge_the_shell(terminal, command):
    await terminal.run("A=kept")
    answer = await terminal.run(command)
    assert answer["output"][1] is True
    assert answer["note"] == ""
    assert await terminal.out("echo $A; pwd") == f"kept\n{terminal.work}\n"


@pytest.mark.parametrize(
    "command",
    [
        "eval() { :; }; printf() { :; }; read() { :; }; declare() { :; }; pwd() { :; }; trap() { :; }; exit() { :; }",
        "alias eval=false while=false if=false true=false printf=false unset=false command=command",
        "trap 'echo seen' DEBUG ERR",
        "set -x",
        "set -u",
        "set -v",
        "set -f",
        "set -a",
        "set -o posix",
        "set -k",
        "IFS=0123456789D",
        "PATH=",
        "PATH=/nowhere",
        "unset PATH HOME LINENO IFS",
        "shopt -s nullglob failglob dotglob; shopt -u expand_aliases",
        "LANG=C LC_ALL=C",
        "BASH_ENV=/dev/stdin ENV=/dev/stdin",
        "set -- one two; shift",
        "exec 3>&1 4>&2 5</dev/null 9>&1",
        "readonly A PWD OLDPWD",
        "ulimit -f 0",
        "disown -a; set +B +h",
        "cd /; cd -; pushd /; popd",
        "coproc cat",
    ],
)
async def test_an_odd_setting_leaves_the_answers_right(terminal, command):
    await terminal.run(f"A=kept; cd {terminal.work}")
    await terminal.run(command)
    for _ in range(2):
        answer = await terminal.run('command printf "%s\n" "<$A>"; (builtin exit 6)')
        assert "<kept>\n" in answer["stdout"]
        assert answer["returncode"] == 6
    answer = await terminal.run("(builtin exit 6); :")
    assert (answer["returncode"], answer["note"]) == (0, "")


@pytest.mark.parametrize(
    "command", ["break", "break 9", "continue", "continue 9", "return 3", "exit() { :; }; local x"]
)
async def test_what_belongs_into_scripts_changes_nothing(terminal, command):
    first = await terminal.out("A=kept; echo $$")
    await terminal.run(command)
    assert await terminal.out("echo $A; echo $$") == f"kept\n{first}"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("exit 3", 3),
        ("exit", 0),
        ("A=changed; cd /; exit 7", 7),
        ("exec true", 0),
        ("exec sh -c 'exit 9'", 9),
        ("set -e; false; echo not reached", 1),
        ("set -u; echo $nothing; echo not reached", 1),
        ("kill -9 $$", 137),
        ("kill $$; sleep 60", 143),
        (": ${nothing:?is missing}", 1),
        ("ulimit -n 3; echo x", 125),
    ],
)
async def test_a_shell_that_ended_is_started_again_as_it_was(terminal, command, code):
    await terminal.run("mkdir inner; cd inner; A='it'\"'\"'s'; export B='two\nlines'; f() { echo f $1; }; readonly C=3")
    first = await terminal.out("echo $$")
    answer = await terminal.run(command)
    assert answer["returncode"] == code
    assert answer["output"][1] is True
    assert "started again" in answer["note"]
    assert "not reached" not in answer["stdout"]
    shown = await terminal.out('basename $PWD; echo "$A"; sh -c \'echo "$B"\'; f x; echo $C')
    assert shown == "inner\nit's\ntwo\nlines\nf x\n3\n"
    assert await terminal.out("echo $$") != first


async def test_what_a_shell_prints_as_it_ends(terminal):
    await terminal.run("trap 'echo bye; touch left' EXIT")
    answer = await terminal.run("echo hi; exit 4")
    assert answer["stdout"] == "hi\nbye\n"
    assert answer["returncode"] == 4
    assert await terminal.out("ls") == "left\n"


async def test_set_e_ends_each_command_that_fails(terminal):
    await terminal.run("A=kept; set -e")
    for _ in range(2):
        assert (await terminal.run("false; echo on"))["stdout"] == ""
    assert await terminal.out("echo $A; set +e") == "kept\n"
    assert await terminal.out("false; echo on") == "on\n"


async def test_a_directory_that_is_gone(terminal):
    await terminal.run("mkdir gone; cd gone; rmdir ../gone")
    assert await terminal.out("echo still here") == "still here\n"
    await terminal.run("exit")
    answer = await terminal.run("pwd")
    assert answer["stdout"] == f"{terminal.work.parent}\n"
    assert "is gone" in answer["note"]


async def test_limits_that_the_shell_set_itself_can_be_left(terminal):
    await terminal.run("A=kept; ulimit -v 40000; ulimit -n 64")
    await terminal.run("exit")
    assert await terminal.out("echo $A; ls /dev/null") == "kept\n/dev/null\n"


async def test_a_state_that_cannot_be_restored_is_left(terminal):
    """A trap that ends every shell but the first."""
    await terminal.run("A=kept; FIRST=$$; trap '[ $$ = $FIRST ] || exit 3' DEBUG")
    await terminal.run("kill -9 $$")
    answer = await terminal.run("echo ${A-gone}")
    assert answer["stdout"] == "gone\n"
    assert "variables are gone" in answer["note"]


async def test_a_shell_that_holds_too_much_loses_it_when_it_ends(terminal):
    await terminal.run("A=1; BIG=$(head -c 2000000 /dev/zero | tr '\\0' x)")
    assert await terminal.out("echo ${#BIG}") == "2000000\n"
    answer = await terminal.run("exit")
    assert "too long to be kept" in answer["note"]
    assert await terminal.out("echo ${A-gone}; pwd") == f"gone\n{terminal.work}\n"


async def test_the_shells_pipes_can_be_removed_by_a_command(terminal, shared):
    await terminal.run("A=kept")
    assert await terminal.out("rm -rf $TMPDIR/.mini-terminal*; echo $A") == "kept\n"
    assert await terminal.out("echo $A") == "kept\n"


# Commands that take too long


@pytest.mark.parametrize(
    "command",
    [
        "sleep {0}; touch never",
        "sh -c 'sleep {0}; touch never'; touch never",
        "(trap '' TERM INT HUP; sleep {0})",
        "trap '' TERM INT HUP QUIT; sleep {0}",
        "while :; do :; done",
        "f() {{ sleep {0}; touch never; }}; f; touch never",
        "exec sleep {0}",
        "sleep {0} | cat | cat",
        "sleep {0} & wait",
        "setsid -w sleep {0}",
        "env -i setsid -w sleep {0}",
        "(setsid sleep {0} &) ; sleep {0}",
        "mkfifo pipe; cat pipe",
        "kill -STOP $$",
        "set -n",
        "echo $(sleep {0})",
        "python3 -c 'import time, signal; signal.signal(15, signal.SIG_IGN); time.sleep(9999)' {0}",
    ],
)
async def test_a_time_out_ends_the_command_and_keeps_the_shell(terminal, command, number):
    await terminal.run("mkdir inner; cd inner; A='it'\"'\"'s'; f() { echo f; }")
    answer = await terminal.run("echo begun; A=changed; " + command.format(number), 1.0)
    assert answer["output"] == ["begun\n", False]
    assert answer["returncode"] == 124
    assert "took longer than 1 s and was ended" in answer["note"]
    assert "are kept" in answer["note"]
    assert await terminal.out('basename $PWD; echo "$A"; f; ls') == "inner\nit's\nf\n" + (
        "pipe\n" if "mkfifo" in command else ""
    )
    await until(lambda: not with_argument(number))


async def test_output_without_end_is_bounded_and_ended(terminal):
    answer = await terminal.run("yes", 1.0)
    assert answer["output"][1] is False
    assert answer["returncode"] == 124
    assert answer["truncated"] is True
    assert len(answer["stdout"]) < 70_000
    assert MARK.search(answer["stdout"])
    assert await terminal.out("pgrep -x yes -s 0 | wc -l; echo on") == "0\non\n"


async def test_a_time_out_leaves_earlier_programs_running(terminal, number):
    await terminal.run(f"sleep {number} & (setsid sleep {number} &)")
    await until(lambda: sum(map(began_in_an_earlier_tick, with_argument(number))) == 2)
    assert (await terminal.run("sleep 60", 0.3))["returncode"] == 124
    assert len(with_argument(number)) == 2


async def test_a_fork_bomb_is_ended(terminal, number):
    bomb = f"b() {{ [ $1 -gt 7 ] || {{ b $(($1 + 1)) & b $(($1 + 1)) & }}; sleep {number}; }}; b 0"
    answer = await terminal.run(bomb, 1.0)
    assert answer["returncode"] == 124
    await until(lambda: not with_argument(number))
    assert await terminal.out("echo on") == "on\n"


# Programs in the background


async def test_a_program_in_the_background_does_not_hold_the_answer_back(terminal, number):
    assert (await terminal.run(f"sleep {number} & echo begun"))["output"] == ["begun\n", True]
    assert await terminal.out("jobs | wc -l; kill %1; wait; echo waited") == "1\nwaited\n"
    await until(lambda: not with_argument(number))


async def test_the_shell_knows_its_jobs(terminal):
    await terminal.run("(sleep 0.1; exit 3) & PID=$!")
    assert (await terminal.run("wait $PID"))["returncode"] == 3


async def test_what_is_printed_later_disturbs_nobody_and_kills_nobody(terminal):
    await terminal.run("(until [ -e go ]; do sleep 0.02; done; head -c 500000 /dev/zero; echo done; touch printed) &")
    assert await terminal.out("touch go; echo mine") == "mine\n"
    await until((terminal.work / "printed").exists)
    assert await terminal.out("echo mine") == "mine\n"


async def test_a_program_that_prints_for_ever_in_the_background(terminal):
    assert (await terminal.run("yes & echo"))["output"][1] is True
    for _ in range(3):
        assert await terminal.out("echo mine") == "mine\n"
    assert await terminal.out("kill %1; wait; jobs -r; echo on") == "on\n"


# Files


async def test_paths_begin_where_the_shell_is(terminal):
    written = await terminal.tool("write_file", path="a/b.txt", content="one\n")
    assert written == {"path": f"{terminal.work}/a/b.txt", "bytes": 4}
    await terminal.run("cd a")
    await terminal.tool("write_file", path="b.txt", content="zwei ü\n", append=True)
    read = await terminal.tool("read_file", path="b.txt")
    assert read == {"content": "one\nzwei ü\n", "size": 12, "next_offset": None, "binary": False}
    assert (await terminal.tool("read_file", path=f"{terminal.work}/a/../a/b.txt"))["size"] == 12
    await terminal.run("ln -s b.txt link; mkdir dir; mkfifo pipe")
    listed = await terminal.tool("list_files")
    assert listed["path"] == f"{terminal.work}/a"
    assert [(entry["name"], entry["type"]) for entry in listed["entries"]] == [
        ("b.txt", "file"),
        ("dir", "directory"),
        ("link", "link"),
        ("pipe", "other"),
    ]
    assert listed["entries"][0]["size"] == 12
    assert (listed["total"], listed["truncated"]) == (4, False)


async def test_a_file_is_read_piece_by_piece(terminal):
    text = "äöü€🙂" * 100
    await terminal.tool("write_file", path="text", content=text)
    pieces, offset = [], 0
    while offset is not None:
        read = await terminal.tool("read_file", path="text", offset=offset, limit=17)
        pieces.append(read["content"])
        offset = read["next_offset"]
    assert "".join(pieces) == text
    assert len(pieces) >= 80
    assert (await terminal.tool("read_file", path="text", offset=10**6))["content"] == ""


async def test_files_that_are_not_text(terminal):
    await terminal.run(r"printf 'a\377b' > data; head -c 3000000 /dev/zero > big")
    assert await terminal.tool("read_file", path="data") == {
        "content": "a\ufffdb",
        "size": 3,
        "next_offset": None,
        "binary": True,
    }
    assert (await terminal.tool("read_file", path="big"))["next_offset"] == 65536
    assert (await terminal.tool("read_file", path="/proc/self/status"))["content"].startswith("Name:")


async def test_what_cannot_be_read_or_written(terminal):
    await terminal.run("mkdir dir; mkfifo pipe; echo > file")
    for path, reason in (
        ("nothing", "No such file"),
        ("dir", "is a directory"),
        ("pipe", "not a regular file"),
        ("/dev/zero", "not a regular file"),
        ("file/x", "not a directory"),
        ("", "empty"),
        ("a\0b", "not a usable path"),
    ):
        assert reason in await terminal.fail("read_file", path=path)
    for path, reason in (("dir", "is a directory"), ("/dev/null", "not a regular file"), ("file/x", "not a directory")):
        assert reason in await terminal.fail("write_file", path=path, content="x")
    await terminal.fail("write_file", path="pipe", content="x")
    assert "No such file" in await terminal.fail("list_files", path="nothing")
    assert "not a directory" in await terminal.fail("list_files", path="file")
    assert "limit" in await terminal.fail("read_file", path="file", limit=0)
    assert "offset" in await terminal.fail("read_file", path="file", offset=-1)
    assert "append" in await terminal.fail("write_file", path="file", content="x" * 1_100_000)


async def test_a_long_directory_is_cut(terminal):
    await terminal.run("mkdir many; cd many; seq -w 1 1200 | xargs touch")
    listed = await terminal.tool("list_files")
    assert len(listed["entries"]) == 1000
    assert listed["entries"][0]["name"] == "0001"
    assert (listed["total"], listed["truncated"]) == (1200, True)


# The reward


async def test_a_task_is_scored_by_checks(terminal):
    await terminal.run("printf 'hello\nworld\n' > a.txt; mkdir dir")
    path = f"{terminal.work.name}/a.txt"
    found = await terminal.score(
        {"kind": "file_exists", "path": path},
        {"kind": "file_exists", "path": f"{terminal.work.name}/dir"},
        {"kind": "file_exists", "path": "nothing"},
        {"kind": "file_contains", "path": path, "text": "o\nw"},
        {"kind": "file_contains", "path": path, "text": "bye"},
        {"kind": "file_equals", "path": path, "text": "hello\nworld\n"},
        {"kind": "file_equals", "path": path, "text": "hello\nthere\n"},
        {"kind": "command", "command": f"grep -c o {path}"},
        {"kind": "command", "command": f"cat {path}; echo err >&2", "output": "err"},
        {"kind": "command", "command": "exit 4"},
    )
    assert found["score"] == 0.6
    assert [check["passed"] for check in found["checks"]] == [
        *(True, True, False, True, False, True, False, True, True, False)
    ]
    assert found["checks"][2] == {
        "kind": "file_exists",
        "target": "nothing",
        "passed": False,
        "why": "nothing is not there",
    }
    assert found["checks"][6]["why"] == "the file differs from byte 6 on"
    assert found["checks"][9]["why"] == "the command ended with 4"


async def test_weights(terminal):
    found = await terminal.score(
        {"kind": "command", "command": "true", "weight": 3}, {"kind": "command", "command": "false"}
    )
    assert found["score"] == 0.75


async def test_the_agents_shell_has_no_say(terminal, tmp_path):
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "grep").write_text("#!/bin/sh\nexit 0\n")
    (fake / "grep").chmod(0o755)
    await terminal.run(
        f"export PATH={fake}:$PATH BASH_ENV=/nowhere; grep() {{ true; }}; export -f grep; cd /; umask 777"
    )
    found = await terminal.score(
        {"kind": "command", "command": "echo x | grep y"}, {"kind": "command", "command": "pwd", "output": "work"}
    )
    assert [check["passed"] for check in found["checks"]] == [False, True]
    await terminal.run("sleep 60 & exit")
    assert (await terminal.score({"kind": "command", "command": "true"}))["score"] == 1


async def test_checks_are_bounded_and_leave_nothing_behind(terminal, number):
    await terminal.run("mkfifo pipe; ln -s /dev/zero zero; ln -s loop loop; head -c 3000000 /dev/zero > big")
    await terminal.run(
        "printf x | dd of=big bs=1 seek=1048575 conv=notrunc; printf y | dd of=big bs=1 seek=1048576 conv=notrunc"
    )
    folder = terminal.work.name
    found = await terminal.score(
        {"kind": "command", "command": f"echo begun; sleep {number}", "timeout": 0.3},
        {"kind": "command", "command": f"setsid sleep {number} & sleep {number} & echo done"},
        {"kind": "command", "command": "yes", "timeout": 0.3},
        {"kind": "file_contains", "path": f"{folder}/pipe", "text": "x"},
        {"kind": "file_contains", "path": f"{folder}/zero", "text": "x"},
        {"kind": "file_equals", "path": f"{folder}/loop", "text": "x"},
        {"kind": "file_contains", "path": f"{folder}/big", "text": "xy"},
        {"kind": "command", "command": "cat; read x || echo empty", "output": "empty"},
    )
    assert [check["passed"] for check in found["checks"]] == [False, True, False, False, False, False, True, True]
    assert found["checks"][0]["why"] == "the command took longer than 0.3 s: begun"
    assert "not a regular file" in found["checks"][3]["why"]
    await until(lambda: not with_argument(number))


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        ({"kind": "file_exists"}, "needs a path"),
        ({"kind": "file_contains", "path": "a"}, "needs a text"),
        ({"kind": "file_contains", "path": "a", "text": ""}, "empty text"),
        ({"kind": "file_equals", "path": "a", "txt": "b"}, "txt"),
        ({"kind": "file_exists", "path": "a", "text": "b"}, "takes no text"),
        ({"kind": "command"}, "needs a command"),
        ({"kind": "command", "command": "true", "path": "a"}, "takes no path"),
        ({"kind": "command", "command": "true", "timeout": 0}, "timeout"),
        ({"kind": "command", "command": "true", "timeout": 1e9}, "timeout"),
        ({"kind": "command", "command": "true", "weight": 0}, "weight"),
        ({"kind": "guess"}, "file_exists"),
    ],
)
async def test_a_check_that_makes_no_sense_is_refused(terminal, check, reason):
    with pytest.raises(Invalid, match=reason):
        await terminal.score(check)


async def test_no_checks_are_no_score(terminal):
    with pytest.raises(Invalid, match="no checks"):
        await terminal.score()


# Its life


async def test_health_does_not_wait_for_a_command(terminal):
    running = asyncio.create_task(terminal.run("until [ -e go ]; do sleep 0.02; done"))
    while not (await terminal.env.check_health())["busy"]:
        await asyncio.sleep(0.02)
    assert (await terminal.env.check_health())["status"] == "healthy"
    (terminal.work / "go").touch()
    assert (await running)["returncode"] == 0
    health = await terminal.env.check_health()
    assert (health["busy"], health["directory"]) == (False, str(terminal.work))


async def test_reset_is_a_new_beginning(terminal, shared, number):
    await terminal.run(f"A=1; export GIVEN=changed; sleep {number} & (setsid sleep {number} &)")
    await until(lambda: len(with_argument(number)) == 2)
    found = await terminal.env.reset(seed=3)
    assert found == {
        "directory": str(shared[1]),
        "files": "kept: the work directory is not the sandbox's own",
        "processes_ended": True,
    }
    assert not with_argument(number)
    assert await terminal.out("echo ${A-gone}; echo $GIVEN; pwd; echo $?") == f"gone\nby the owner\n{shared[1]}\n0\n"


async def test_reset_ends_the_command_that_runs(terminal, number):
    running = asyncio.create_task(terminal.run(f"sleep {number}; echo not reached", 60))
    await until(lambda: with_argument(number))
    assert (await terminal.env.reset())["processes_ended"] is True
    answer = await running
    assert answer["returncode"] == 137
    assert "reset" in answer["note"]
    assert answer["stdout"] == ""
    assert not with_argument(number)


async def test_nothing_is_left_when_the_sandbox_ends(tmp_path, number):
    with served(tmp_path) as (running, work, temporary):
        async with Environment("mini-terminal", provision=attach(running.url)) as env:
            terminal = Terminal(env, work)
            await terminal.run(f"(setsid sleep {number} &); sleep {number} & trap '' TERM HUP; sleep {number} &")
            await until(lambda: len(with_argument(number)) == 3)
        assert running.stop() == 0
    assert not with_argument(number)
    assert list(temporary.iterdir()) == []


async def test_a_sandbox_ends_while_a_command_runs(tmp_path, number):
    with served(tmp_path) as (running, work, temporary):
        async with Environment("mini-terminal", provision=attach(running.url), max_retries=0) as env:
            call = asyncio.create_task(Terminal(env, work).run(f"sleep {number}"))
            await until(lambda: with_argument(number))
            running.process.terminate()
            await asyncio.to_thread(running.process.wait, 30)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
    assert not with_argument(number)
    assert list(temporary.iterdir()) == []


@pytest.fixture
async def isolated(monkeypatch, tmp_path):
    """The terminal under the process engine, where this machine can give it files of its own."""
    for name in ("DUMMY_INSTANCE_IP", "AENV_SYSTEM_URL", "AENV_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    async with Environment("mini-terminal@1.0.1") as env:
        terminal = Terminal(env, Path("/project"))
        await terminal.run("true")
        if (await env.reset())["files"] != "put back":
            pytest.skip("this machine gives a sandbox no files of its own")
        yield terminal


async def test_reset_puts_files_back_where_they_are_the_sandboxes_own(isolated):
    before = await isolated.out("ls -lR --time-style=+ | grep -v ^total; cat config.json")
    await isolated.run(
        "rm -r src; echo changed > config.json; mkdir -p new/deep; chmod 0 new; ln -s / root; touch file"
    )
    assert (await isolated.env.reset())["files"] == "put back"
    after = await isolated.out("ls -lR --time-style=+ | grep -v ^total; cat config.json")

    def named(listing):  # what was made again belongs to the sandbox's user
        return [re.sub(r"^(\S{10}).*?(\d+ +\S+)$", r"\1 \2", line) for line in listing.splitlines()]

    assert [line for line in named(after) if not line.startswith("d")] == [
        line for line in named(before) if not line.startswith("d")
    ]


async def test_a_full_disk_can_be_cleared(isolated):
    answer = await isolated.run("A=kept; head -c 400000000 /dev/zero > /tmp/fill")
    assert "No space left" in answer["stderr"]
    assert (await isolated.run("sleep 60", 0.3))["returncode"] == 124
    assert await isolated.out("echo $A; rm /tmp/fill; echo on") == "kept\non\n"


async def test_no_files_left_can_be_cleared(isolated):
    await isolated.run("A=kept; mkdir /tmp/many; cd /tmp/many; seq 1 110000 | xargs touch 2>/dev/null")
    answer = await isolated.run("cd ..; touch one-more")
    assert "No space left" in answer["stderr"]
    assert await isolated.out("rm -r many; echo $A; touch one-more && echo on") == "kept\non\n"


async def test_a_fork_bomb_in_the_background_does_not_end_the_terminal(isolated):
    answer = await isolated.run("A=kept; b() { b | b & }; b; sleep 0.5", 20)
    assert "Resource temporarily unavailable" in answer["stderr"]
    assert (await isolated.run("sleep 60", 0.5))["returncode"] == 124
    assert await isolated.out("echo $A") == "kept\n"
    assert (await isolated.env.reset())["processes_ended"] is True
    assert await isolated.out("ls -d /; echo on") == "/\non\n"


# Forks and checkpoints


SHELL = r"""mkdir lab; cd lab; export A='it'"'"'s' N=$'\377'; B='two
lines'; f() { echo f $1; }; alias hi='echo hello'
shopt -s nullglob; set -o pipefail; set -- 'one  two' three; unset USER
rm -r ../src; echo x > /tmp/x; mkfifo pipe; echo new > ../config.json; (exit 7)"""
SHOWN = r"""echo $? "$A$B" "$1" $# ${USER-gone} nothing* | tr '\n' ' '; basename "$PWD"; f x
hi; sh -c 'printf %s "$N"' | od -An -tx1; set +o | grep pipefail; ls .. .; cat ../config.json; ls -A /tmp; cat /tmp/x"""


async def test_a_fork_goes_on_where_the_terminal_is(isolated):
    assert (await isolated.run(SHELL))["returncode"] == 7
    async with await isolated.env.fork(2) as siblings:
        assert [sibling.forked.how for sibling in siblings] == ["saved", "saved"], siblings[0].forked.why
        first, second = (Terminal(sibling, isolated.work) for sibling in siblings)
        shown = await isolated.out(SHOWN)
        assert shown.startswith("7 it'stwo lines one  two 2 gone lab\nf x\nhello\n ff\nset -o pipefail\n.:\npipe\n")
        assert "src" not in shown
        assert re.search(r"\nnew\n\.mini-terminal-\d+\nx\nx\n$", shown)
        answers = [await terminal.run(SHOWN) for terminal in (first, second)]
        assert [(answer["stdout"], answer["note"]) for answer in answers] == [(shown, "")] * 2
        await first.run("A=other; echo y > /tmp/x; cd /")
        again = await second.env.fork(1)
        assert again[0].forked.how == "saved"
        assert await Terminal(again[0], isolated.work).out("echo $A; cat /tmp/x; pwd") == "it's\nx\n/project/lab\n"
        await again.release()


async def test_a_fork_is_reset_to_the_first_files(isolated):
    before = await isolated.out("find . -type f | sort | xargs sha256sum")
    await isolated.run("mkdir lab; rm -r src; echo new > config.json")
    async with await isolated.env.fork(1) as siblings:
        sibling = Terminal(siblings[0], isolated.work)
        assert await sibling.out("ls -d src lab 2>/dev/null") == "lab\n"
        found = await siblings[0].reset()
        assert (found["files"], found["processes_ended"]) == ("put back", True)
        assert await sibling.out("find . -type f | sort | xargs sha256sum; ls -d lab 2>/dev/null") == before


async def test_a_checkpoint_is_gone_back_to(isolated):
    place = await isolated.env.checkpoint()
    await isolated.run(SHELL)
    later = await isolated.env.checkpoint()
    shown = await isolated.out(SHOWN)
    await isolated.run("rm -r ../lab /tmp/x; exit 3")
    await isolated.env.restore(later)
    assert await isolated.out(SHOWN) == shown
    await isolated.env.restore(place)
    assert await isolated.out("pwd; echo ${A-gone}; ls -d src; ls /tmp") == "/project\ngone\nsrc\n"


async def test_a_program_in_the_background_is_in_the_way_of_a_fork_and_named(isolated):
    await isolated.run("sleep 100 &")
    with pytest.raises(Unsupported, match=r"programs still run in the background: sleep 100 \(\d+\)"):
        await isolated.env.fork(1)
    with pytest.raises(Unsupported, match="sleep 100"):
        await isolated.env.checkpoint()
    await isolated.run("kill %1; wait")
    async with await isolated.env.fork(1) as siblings:
        assert await Terminal(siblings[0], isolated.work).out("jobs; echo on") == "on\n"


# The project


def test_it_is_built_in():
    assert "mini-terminal" in builtin_names()
    assert builtin("mini-terminal") == PROJECT
    for name in ("nothing", "..", "", "mini-terminal/src", "/etc"):
        assert builtin(name) is None


def test_it_is_what_init_makes(tmp_path):
    made = {path.relative_to(tmp_path / "x") for path in scaffold("x", tmp_path)}
    assert all((PROJECT / path).is_file() for path in made)
    for same in ("Dockerfile", "requirements.txt", "test/conftest.py"):
        assert (PROJECT / same).read_text() == (tmp_path / "x" / same).read_text()
    found = project.read(PROJECT)
    assert (found.name, found.version, found.warnings) == ("mini-terminal", "1.0.1", ())


def test_importing_it_starts_nothing():
    code = """
import sys, threading, os
sys.path.insert(0, "src")
import aenv.runtime.registry, tempfile, subprocess, secrets
events = []
sys.addaudithook(lambda name, _: events.append(name))
import custom_env
assert threading.active_count() == 1, threading.enumerate()
assert not [e for e in events if e.startswith(("subprocess", "os.fork", "os.posix_spawn", "os.exec", "socket"))], events
assert custom_env.terminal.directory is None
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_its_own_tests_pass():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "test"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
