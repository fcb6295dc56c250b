"""Telling whether a project was edited."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aenv.project import stamp as stamping
from aenv.project.stamp import stamp


def test_a_stamp_changes_with_the_files_and_with_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    file = tmp_path / "src" / "a.py"
    file.write_text("one")
    seen = [stamp(tmp_path)]
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index").write_text("x")
    (tmp_path / "src" / "__pycache__").mkdir()
    (tmp_path / "src" / "__pycache__" / "a.pyc").write_text("x")
    assert stamp(tmp_path) == seen[0]
    file.write_text("three")
    seen.append(stamp(tmp_path))
    os.utime(file, ns=(1, 1))
    seen.append(stamp(tmp_path))
    (tmp_path / "b.txt").write_text("")
    seen.append(stamp(tmp_path))
    (tmp_path / "b.txt").rename(tmp_path / "c.txt")
    seen.append(stamp(tmp_path))
    assert len(set(seen)) == len(seen)


def test_a_large_project_is_looked_at_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stamping, "MOST_FILES", 2)
    for name in "abc":
        (tmp_path / name).write_text(name)
    before = stamp(tmp_path)
    (tmp_path / "c").write_text("changed")
    assert stamp(tmp_path) == before
    (tmp_path / "b").write_text("changed")
    assert stamp(tmp_path) != before
