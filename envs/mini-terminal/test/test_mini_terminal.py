"""The parts that a sandbox on one machine does not show: the other shell, and files that are put back."""

import json
import os
import re
import threading
import time

import pytest
from mini_terminal import baseline, carried
from mini_terminal.baseline import Baseline, TooMuch, is_private
from mini_terminal.capture import LIMIT, Stream
from mini_terminal.dialects import Bash, Posix
from mini_terminal.terminal import Terminal

from aenv import Unsupported


@pytest.fixture(params=[Bash("/bin/bash"), Posix("/bin/sh")], ids=["bash", "sh"])
def run(request, tmp_path):
    if not os.access(request.param.path, os.X_OK):
        pytest.skip(f"there is no {request.param.path}")
    terminal = Terminal(lambda: request.param)

    def run(command, timeout=30):
        return terminal.run(command, timeout, str(tmp_path), os.environ)

    yield run
    assert terminal.end()


def test_either_shell_keeps_its_state(run):
    run("mkdir inner; cd inner; export A='it'\"'\"'s'; B='two\nlines'; umask 027; set -f")
    for end in ("sleep 60", "exit 7", "while :; do :; done", "exec sleep 60"):
        assert run(end, 0.3).returncode in (124, 7)
        shown = run('basename "$PWD"; sh -c \'echo "$A"\'; echo "$B"; umask; echo *').stdout.text
        assert shown == "inner\nit's\ntwo\nlines\n0027\n*\n"


@pytest.mark.parametrize("command", ['echo "a', "if true; then", ")", "echo ${", "cat <<X", "f() {", "echo $((1+"])
def test_either_shell_survives_a_mistake(run, command):
    run("A=kept")
    run(command)
    assert run("echo $A").stdout.text == "kept\n"


@pytest.mark.parametrize("command", ["break", "continue 3", "return 4", "set -e; false", "shift 9", ". /nothing"])
def test_either_shell_survives_what_belongs_into_scripts(run, command):
    run("A=kept")
    run(command)
    assert run("echo $A").stdout.text == "kept\n"


def test_either_shell_has_the_exit_code_of_the_last_command(run):
    assert run("(exit 9)").returncode == 9
    assert run("echo $?").stdout.text == "9\n"
    assert run("echo $?").stdout.text == "0\n"


def test_a_stream_keeps_both_ends():
    reader, writer = os.pipe()
    stream = Stream(reader)
    stream.add("é".encode() * LIMIT)
    stream.add(b"end")
    os.close(writer)
    stream.release()
    found = stream.text()
    assert found.truncated
    assert not found.binary
    first, left_out, last = re.split(r"\n\[\.\.\. (\d+) bytes left out \.\.\.\]\n", found.text)
    assert first == "é" * (LIMIT // 4)
    assert last.endswith("éend")
    assert len((first + last).encode()) + int(left_out) == 2 * LIMIT + 3


def tree(root):
    return {
        str(path.relative_to(root)): (path.lstat().st_mode, None if path.is_dir() else os.readlink(path))
        if path.is_symlink()
        else (path.lstat().st_mode, None if path.is_dir() else path.read_bytes())
        for path in sorted(root.rglob("*"))
    }


@pytest.fixture
def work(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "b.txt").chmod(0o640)
    (tmp_path / "link").symlink_to("b.txt")
    return tmp_path


def test_files_are_put_back(work):
    before = tree(work)
    kept = Baseline(str(work))
    (work / "inner" / "a.txt").unlink()
    (work / "inner").rmdir()
    (work / "inner").write_text("no longer a directory")
    (work / "b.txt").write_text("changed")
    (work / "b.txt").chmod(0o777)
    (work / "link").unlink()
    (work / "link").symlink_to("/etc")
    (work / "new" / "deep").mkdir(parents=True)
    (work / "new" / "deep" / "c.txt").write_text("c")
    (work / "new").chmod(0)
    assert kept.put_back() == []
    assert tree(work) == before


def test_a_link_in_the_place_of_a_directory_leads_nowhere(work, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "precious.txt").write_text("kept")
    outside.chmod(0o711)
    kept = Baseline(str(work))
    (work / "inner" / "a.txt").unlink()
    (work / "inner").rmdir()
    (work / "inner").symlink_to(outside)
    (work / "more").symlink_to(outside)
    assert kept.put_back() == []
    assert (outside / "precious.txt").read_text() == "kept"
    assert outside.stat().st_mode & 0o777 == 0o711
    assert not (work / "more").exists()


def test_a_deep_tree_is_removed(work):
    before = tree(work)
    kept = Baseline(str(work))
    inner = work
    for _ in range(1200):
        inner /= "d"
        inner.mkdir()
    assert kept.put_back() == []
    assert tree(work) == before


def test_too_much_is_not_kept(work, monkeypatch):
    monkeypatch.setattr(baseline, "MOST_BYTES", 3)
    with pytest.raises(TooMuch, match="3 bytes"):
        Baseline(str(work))
    monkeypatch.setattr(baseline, "MOST_ENTRIES", 2)
    with pytest.raises(TooMuch, match="2 entries"):
        Baseline(str(work))


def test_a_directory_of_somebody_elses_is_not_private(work):
    assert not is_private(str(work))
    assert not is_private("/")
    assert not is_private("/proc")


class Elsewhere(Terminal):
    """As in another sandbox: its programs are not those of the terminals here."""

    _mark = "elsewhere"


@pytest.fixture(params=[Bash("/bin/bash"), Posix("/bin/sh")], ids=["bash", "sh"])
def pair(request, tmp_path, monkeypatch):
    """A terminal, and another that goes on in its place; both with their temporary files here."""
    if not os.access(request.param.path, os.X_OK):
        pytest.skip(f"there is no {request.param.path}")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    terminals = Terminal(lambda: request.param), Elsewhere(lambda: request.param)
    given = {"PATH": os.environ["PATH"], "GIVEN": "by the owner", "odd.name": "x"}

    class Pair:
        bash = request.param.name == "bash"
        temporary = tmp_path / "tmp"
        first, second = terminals

        @staticmethod
        def run(terminal, command, timeout=30):
            return terminal.run(command, timeout, str(tmp_path), given)

        @classmethod
        def carry(cls):
            kept = carried.from_terminal(cls.first.save())
            cls.second.load(carried.to_terminal(json.loads(json.dumps(kept))), str(tmp_path), given)

        @classmethod
        def both(cls, command):
            """What the two answer, which must be the same."""
            first, second = (cls.run(terminal, command) for terminal in terminals)
            assert first == second
            assert first.note == ""
            return first.stdout.text

    yield Pair
    for terminal in terminals:
        assert terminal.end()


def test_another_terminal_goes_on(pair):
    pair.run(pair.first, "mkdir inner; cd inner; export A='it'\"'\"'s'; B='two\nlines'; umask 027; set -f; unset GIVEN")
    assert pair.run(pair.first, "(exit 9)").returncode == 9
    pair.carry()
    assert pair.both("echo $?; pwd | sed s,.*/,,") == "9\ninner\n"
    assert (
        pair.both('sh -c \'echo "$A$B"\'; echo "$B"; umask; echo * ${GIVEN-gone}') == "it's\ntwo\nlines\n0027\n* gone\n"
    )
    assert "\nPATH=" in pair.both("env | grep -v MINI_TERMINAL= | sort")


def test_another_terminal_goes_on_after_the_shell_has_ended(pair):
    pair.run(pair.first, "A=1")
    assert pair.run(pair.first, "A=2; exit 5").returncode == 5
    pair.carry()
    assert pair.both("echo $? $A") == "5 1\n"


def test_what_only_bash_can_tell(pair):
    if not pair.bash:
        pytest.skip("sh does not tell it")
    pair.run(pair.first, "f() { echo f $1; }; g() { echo g; }; export -f g; alias hi='echo hello'; shopt -s nullglob")
    pair.run(
        pair.first,
        "set -o pipefail; set -- 'one  two' '' $'\\377'; declare -A map=(['a b']=c); readonly C=3; N=$'\\377'",
    )
    pair.run(pair.first, "trap 'echo bye' EXIT; false | true")
    pair.carry()
    assert pair.both("echo $?") == "1\n"
    assert pair.both("f x; bash -c g; hi; echo nothing*") == "f x\ng\nhello\n\n"
    assert pair.both('echo $# "[$1][$2]" ${map[a b]} $C; printf %s%s "$3" "$N" | od -An -tx1') == (
        "3 [one  two][] c 3\n ff ff\n"
    )
    assert pair.both("trap -p EXIT; declare -F; set +o | grep pipefail") == (
        "trap -- 'echo bye' EXIT\ndeclare -f f\ndeclare -fx g\nset -o pipefail\n"
    )


def test_a_terminal_that_was_never_used_is_carried(pair):
    pair.run(pair.second, "A=1; cd /")
    pair.carry()
    assert pair.second.directory is None
    assert pair.both("echo ${A-gone} $? $GIVEN") == "gone 0 by the owner\n"


def test_what_another_terminal_is_and_was_are_apart(pair):
    first = pair.run(pair.second, "A=1; echo $$; sleep 60 & trap 'exit 3' DEBUG").stdout.text
    pair.run(pair.first, "B=2")
    pair.carry()
    assert pair.both("echo ${A-gone} $B; jobs") == "gone 2\n"
    assert pair.run(pair.second, "echo $$").stdout.text != first


def test_no_pipes_are_carried_and_both_have_theirs(pair):
    pair.run(pair.first, "A=1")
    pair.first.save()
    assert list(pair.temporary.iterdir()) == []
    assert pair.run(pair.first, "echo $A").stdout.text == "1\n"
    assert len(list(pair.temporary.iterdir())) == 1


@pytest.mark.parametrize("command", ["sleep 987 &", "(setsid sleep 987 &)", "sleep 987 & sleep 0.1; kill -STOP $!"])
def test_programs_in_the_background_are_in_the_way_and_named(pair, command):
    pair.run(pair.first, command)
    with pytest.raises(Unsupported, match=r"programs still run in the background: sleep 987 \(\d+\)$"):
        pair.first.save()
    assert pair.run(pair.first, "echo on").stdout.text == "on\n"
    assert pair.first.end()
    pair.carry()


def test_a_program_that_was_told_to_end_is_waited_for(pair):
    pair.run(pair.first, "(trap 'sleep 0.1; exit' TERM; echo > ready; while :; do sleep 0.01; done) & echo $! > pid")
    pair.run(pair.first, "until [ -e ready ]; do sleep 0.01; done; kill $(cat pid)")
    pair.carry()


def test_many_programs_are_counted(pair):
    pair.run(pair.first, "for i in 1 2 3 4 5; do sleep 987 & done")
    with pytest.raises(Unsupported, match=r"(sleep 987 \(\d+\), ){3}and 2 more$"):
        pair.first.save()


def test_a_command_under_way_is_not_waited_for(pair):
    running = threading.Thread(target=pair.run, args=(pair.first, "until [ -e go ]; do sleep 0.02; done"))
    running.start()
    while not pair.first.busy:
        time.sleep(0.01)
    with pytest.raises(Unsupported, match="a command is under way"):
        pair.first.save()
    pair.run(pair.second, "touch go")
    running.join()
    pair.carry()


def test_what_is_not_kept_is_not_carried(pair):
    pair.run(pair.first, "mkdir gone; cd gone; rmdir ../gone; mkdir ../gone")
    with pytest.raises(Unsupported, match=r"the directory that the shell is in is gone: .*/gone"):
        pair.first.save()
    pair.run(pair.first, "cd ..; BIG=$(head -c 2000000 /dev/zero | tr '\\0' x)")
    with pytest.raises(Unsupported, match="over 1048576 bytes of variables"):
        pair.first.save()


def test_a_shell_that_cannot_be_the_same_is_refused(pair):
    if pair.bash:
        pair.run(pair.first, "FIRST=$$; trap '[ $$ = $FIRST ] || exit 3' DEBUG")
        with pytest.raises(Unsupported, match="its variables are gone"):
            pair.carry()
    pair.run(pair.first, "trap - DEBUG 2>/dev/null; mkdir inner; cd inner")
    kept = pair.first.save()
    with pytest.raises(Unsupported, match="inner is gone"):
        pair.second.load(kept._replace(directory=f"{kept.directory}/gone/inner"), "/", {})
    assert pair.second.directory is None


def test_a_program_of_another_terminal_is_known_by_its_own_mark(pair):
    pair.run(pair.first, "A=1")
    pair.carry()
    answer = pair.run(pair.second, "echo $A $MINI_TERMINAL; env | grep MINI_TERMINAL=")
    assert answer.stdout.text == "1 elsewhere\nMINI_TERMINAL=elsewhere\n"


def test_what_is_put_back_is_carried(work):
    os.symlink("b.txt", os.fsencode(work) + b"/\xff")
    (work / "inner" / "a.txt").write_bytes(bytes(range(256)))
    before = tree(work)
    kept = json.dumps(carried.from_baseline(Baseline(str(work))))
    (work / "inner" / "a.txt").unlink()
    (work / "b.txt").chmod(0o777)
    (work / "new").mkdir()
    assert carried.to_baseline(json.loads(kept)).put_back() == []
    assert tree(work) == before
