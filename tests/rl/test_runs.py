"""A run in its folder: what was asked for, what has ended, and how it is gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from aenv.errors import AEnvError, Conflict, Invalid
from aenv.rl import Failed, Task, Trajectory, files
from aenv.rl.files import NAME
from aenv.rl.runs import ABOUT, Asked, Run, tasks_digest, write_whole
from tests.rl import made

ASKED = Asked(env="e", agent="a:b", tasks="digest", n=2, seed=0, rewards={"reward": 1.0})
FAILED = Failed(kind="network", phase="tool", reason="cut")


def one(group: str, sample: int, **given: Any) -> Trajectory:
    return made.trajectory(id=f"{group}{sample}", group=group, sample=sample, **given)


def test_a_run_is_gone_on_with(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "one"
    with Run.open(folder, ASKED, resume=False) as run:
        assert not run.resumed
        run.add(one("a", 0))
        run.add(one("a", 1, outcome=FAILED))
        id = run.about.id
    with Run.open(folder, ASKED, resume=True) as run:
        assert run.resumed
        assert run.about.id == id
        assert run.done == {("a", 0), ("a", 1)}
        assert (run.tally.episodes, run.tally.scored) == (2, 1)
        run.add(one("b", 0))
    assert [trajectory.id for trajectory in files.read(folder / NAME)] == ["a0", "a1", "b0"]


def test_what_failed_is_played_again_and_what_was_torn_too(tmp_path: Path) -> None:
    with Run.open(tmp_path, ASKED, resume=False) as run:
        run.add(one("a", 0))
        run.add(one("a", 1, outcome=FAILED))
        run.add(one("b", 0))
    path = tmp_path / NAME
    path.write_bytes(path.read_bytes() + files.line_of(one("b", 1))[:50])
    with Run.open(tmp_path, ASKED, resume=True, again=lambda _: True) as run:
        assert run.done == {("a", 0), ("b", 0)}
        assert run.tally.failed == 0
        run.add(one("a", 1))
        with pytest.raises(Conflict), files.Writer(path):  # it is the new file that is held
            pass
    assert [trajectory.id for trajectory in files.read(path)] == ["a0", "b0", "a1"]
    assert sorted(file.name for file in tmp_path.iterdir()) == [ABOUT, NAME]


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path: Path) -> None:
    with Run.open(tmp_path, ASKED, resume=False) as run:
        run.add(one("a", 0))
    with pytest.raises(Conflict, match="holds a run already"):
        Run.open(tmp_path, ASKED, resume=False)
    assert len(list(files.read(tmp_path / NAME))) == 1


@pytest.mark.parametrize(
    "change", [{"env": "f"}, {"agent": "c:d"}, {"tasks": "other"}, {"n": 3}, {"seed": 1}, {"rewards": {"reward": 2.0}}]
)
def test_another_run_is_not_gone_on_with(tmp_path: Path, change: dict[str, Any]) -> None:
    with Run.open(tmp_path, ASKED, resume=False):
        pass
    with pytest.raises(Invalid, match=f"its {next(iter(change))} was"):
        Run.open(tmp_path, msgspec.structs.replace(ASKED, **change), resume=True)


def test_two_at_a_time(tmp_path: Path) -> None:
    with Run.open(tmp_path, ASKED, resume=False) as run:
        run.add(one("a", 0))
        with pytest.raises(Conflict, match="another process"), Run.open(tmp_path, ASKED, resume=True):
            pass
        with (
            pytest.raises(Conflict, match="another process"),
            Run.open(tmp_path, ASKED, resume=True, again=lambda _: True),
        ):
            pass
        run.add(one("a", 1))
    assert len(list(files.read(tmp_path / NAME))) == 2


def test_trajectories_without_a_run(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(files.line_of(one("a", 0)))
    for resume in (True, False):
        with pytest.raises(Invalid, match="has trajectories and no run.json"):
            Run.open(tmp_path, ASKED, resume=resume)
    assert not (tmp_path / ABOUT).exists()


def test_one_episode_twice_is_told(tmp_path: Path) -> None:
    with Run.open(tmp_path, ASKED, resume=False) as run:
        run.add(one("a", 0))
    path = tmp_path / NAME
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(Invalid, match="two episodes of 'a', sample 0"), Run.open(tmp_path, ASKED, resume=True):
        pass
    with files.Writer(path):  # it was let go
        pass


def test_a_folder_whose_word_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / ABOUT).write_text("{")
    with pytest.raises(Invalid, match=ABOUT):
        Run.open(tmp_path, ASKED, resume=True)


def test_files_are_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.json"
    write_whole(path, {"a": 1})
    write_whole(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert [file.name for file in path.parent.iterdir()] == ["report.json"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(AEnvError, match="cannot be written"):
        write_whole(tmp_path / "file" / "report.json", {})


def test_the_digest_of_tasks_is_of_all_and_in_order() -> None:
    tasks = [Task.of({"id": id}) for id in "abc"]
    assert tasks_digest(tasks) == tasks_digest(list(tasks))
    assert len({tasks_digest(tasks), tasks_digest(tasks[::-1]), tasks_digest(tasks[:2])}) == 3
