"""Files of trajectories: what was written is there, what was torn is passed over, what is strange is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.errors import Conflict, Invalid, NotFound, StorageFull
from aenv.rl import Scored, Trajectory, Writer, files, read
from aenv.rl.trajectory import SCHEMA
from tests.rl import made


def some(count: int) -> list[Trajectory]:
    return [made.trajectory(id=f"e{place}", sample=place, outcome=Scored(score=place / 2)) for place in range(count)]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "t.jsonl"
    with Writer(path) as writer:
        for place, trajectory in enumerate(some(3), 1):
            writer.write(trajectory)
            assert len(list(read(path))) == place  # while it is open, too
    with Writer(path) as writer:
        writer.write(made.trajectory(id="more"))
    assert list(read(path)) == [*some(3), made.trajectory(id="more")]


@given(cut=st.integers(1, 2000))
def test_a_last_line_that_was_torn_is_passed_over_and_then_mended(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("torn") / "t.jsonl"
    lines = [files.line_of(trajectory) for trajectory in some(3)]
    last = lines[2][: min(cut, len(lines[2]) - 2)]
    path.write_bytes(lines[0] + lines[1] + last)
    assert list(read(path)) == some(2)
    with Writer(path) as writer:
        writer.write(some(4)[3])
    assert list(read(path)) == [*some(2), some(4)[3]]


def test_a_last_line_that_only_lacks_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"\n".join(files.line_of(trajectory).strip() for trajectory in some(2)))
    assert list(read(path)) == some(2)
    with Writer(path) as writer:
        writer.write(some(3)[2])
    assert list(read(path)) == some(3)


def test_a_torn_line_of_many_blocks_and_a_file_of_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_BLOCK", 7)
    path = tmp_path / "t.jsonl"
    path.write_bytes(files.line_of(some(1)[0]) + b"x" * 100)
    with Writer(path):
        pass
    assert path.read_bytes() == files.line_of(some(1)[0])
    path.write_bytes(b"y" * 100)
    with Writer(path):
        pass
    assert path.read_bytes() == b""
    path.write_bytes(b"")
    with Writer(path):
        pass
    assert list(read(path)) == []


def test_two_writers(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    with Writer(path) as writer:
        writer.write(some(1)[0])
        with pytest.raises(Conflict, match="another process writes"), Writer(path):
            pass
        script = f"from aenv.rl import Writer\nwith Writer({str(path)!r}): pass"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
        assert "Conflict" in done.stderr
        writer.write(some(2)[1])
    assert list(read(path)) == some(2)
    with Writer(path) as writer:
        writer.write(some(3)[2])
    assert list(read(path)) == some(3)


def test_what_was_written_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    script = (
        "import os, signal\nfrom aenv.rl import Writer\nfrom tests.rl.test_files import some\n"
        f"with Writer({str(path)!r}) as writer:\n"
        "    for trajectory in some(5):\n        writer.write(trajectory)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], check=False, timeout=60)
    assert done.returncode == -9
    assert list(read(path)) == some(5)
    with Writer(path):  # nobody holds it any more
        pass


@pytest.fixture
def tiny(tmp_path: Path) -> Any:
    """A file system with room for little."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    if os.getuid() != 0:
        pytest.skip("mounting a file system needs root")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_keeps_what_was_written_and_takes_no_part_of_more(tiny: Path) -> None:
    path = tiny / "t.jsonl"
    written: list[Trajectory] = []

    def fill(writer: Writer) -> None:
        for trajectory in some(1000):
            writer.write(trajectory)
            written.append(trajectory)

    with Writer(path) as writer:
        with pytest.raises(StorageFull, match="No space left"):
            fill(writer)
        assert written
        assert list(read(path)) == written
        assert path.read_bytes().endswith(b"\n")
        with pytest.raises(StorageFull):
            writer.write(some(1000)[-1])
        assert list(read(path)) == written


# What is no trajectory


@pytest.mark.parametrize(
    ("line", "said", "hint"),
    [
        (b"{", "is no trajectory", SCHEMA),
        (b"[1]", "has no schema", "name a file"),
        (b"7", "has no schema", "name a file"),
        (b'{"schema": "aenv.trajectory/2"}', "'aenv.trajectory/2'", "update this one"),
        (b'{"schema": "other/1"}', "'other/1'", "name a file"),
        (b'{"schema": ["aenv.trajectory/1"]}', "schema", ""),
        (b'{"schema": "aenv.trajectory/1"}', "is no trajectory", SCHEMA),
        (b"\xff\xfe", "is no trajectory", SCHEMA),
        (b"[" * 100_000, "is no trajectory", SCHEMA),
    ],
    ids=["torn", "list", "number", "newer", "other", "list as schema", "nothing in it", "no text", "deep"],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, line: bytes, said: str, hint: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(files.line_of(some(1)[0]) + b"\n  \n" + line + b"\n")
    found = read(path)
    assert next(found) == some(1)[0]
    with pytest.raises(Invalid, match=said) as caught:
        next(found)
    assert f"{path}:4" in caught.value.message
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize("score", ["NaN", "Infinity", "true", '"1.0"', "null", "1e999"])
def test_a_score_that_is_no_number_is_not_read(score: str) -> None:
    raw = json.loads(files.line_of(some(1)[0]))
    raw["outcome"] = {"type": "scored", "score": 12345, "components": {}}
    line = json.dumps(raw).replace("12345", score)
    with pytest.raises(Invalid, match="is no trajectory"):
        files.parse(line)


def test_a_failure_with_a_score_beside_it_has_none() -> None:
    raw = json.loads(files.line_of(some(1)[0]))
    raw["outcome"] = {"type": "failed", "kind": "network", "phase": "tool", "reason": "x", "score": 1.0}
    assert files.parse(json.dumps(raw)).ok is False


def test_older_lines_are_brought_up_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(raw: dict[str, Any]) -> dict[str, Any]:
        return {**raw, "schema": "aenv.trajectory/0.5", "env": raw["environment"]}

    def second(raw: dict[str, Any]) -> dict[str, Any]:
        raw.pop("environment")
        return {**raw, "schema": SCHEMA}

    monkeypatch.setattr(files, "MIGRATIONS", {"aenv.trajectory/0": first, "aenv.trajectory/0.5": second})
    raw = json.loads(files.line_of(some(1)[0]))
    raw["environment"] = raw.pop("env")
    raw["schema"] = "aenv.trajectory/0"
    assert files.parse(json.dumps(raw)) == some(1)[0]


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="there is no file"):
        list(read(tmp_path / "none"))
    with pytest.raises(NotFound, match="there is no file .*trajectories.jsonl"):
        list(read(tmp_path))
    with Writer(tmp_path / files.NAME) as writer:
        writer.write(some(1)[0])
    assert list(read(tmp_path)) == some(1)


@given(trajectory=made.anything)
def test_any_is_one_line_and_the_same_again(trajectory: Trajectory) -> None:
    line = files.line_of(trajectory)
    assert line.index(b"\n") == len(line) - 1
    assert files.parse(line) == trajectory
