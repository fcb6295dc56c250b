"""The parts that a sandbox on one machine does not show: the other shell, and files that are put back."""

import os
import re

import pytest
from mini_terminal import baseline
from mini_terminal.baseline import Baseline, TooMuch, is_private
from mini_terminal.capture import LIMIT, Stream
from mini_terminal.dialects import Bash, Posix
from mini_terminal.terminal import Terminal


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
