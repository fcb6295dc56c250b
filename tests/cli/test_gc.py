"""``aenv gc`` and what is kept: what is old goes, what is needed stays. Of sandboxes, see engines/process."""

import os
import time

import pytest

from aenv.engines.docker import daemon
from aenv.engines.process import cgroups, venvs


@pytest.fixture(autouse=True)
def no_strays(monkeypatch):
    """The control groups and containers of this machine belong to others."""
    monkeypatch.setattr(cgroups, "strays", list)
    monkeypatch.setattr(daemon, "SOCKETS", ())
    for name in ("AENV_DOCKER_HOST", "DOCKER_HOST", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("variable", ["AENV_DOCKER_HOST", "DOCKER_HOST"])
def test_a_daemon_that_is_named_must_answer(aenv, tmp_path, monkeypatch, variable):
    assert aenv("gc", "-o", "json").data["found"] == []
    monkeypatch.setenv(variable, f"unix://{tmp_path}/no.sock")
    answer = aenv("gc", "-o", "json")
    assert (answer.code, answer.out) == (1, "")
    assert "neither Docker nor Podman answers" in answer.err


@pytest.fixture
def scripts(home):
    folder = home / "cache" / "scripts"
    folder.mkdir(parents=True)
    return folder


def kept(folder, name, age):
    """Something that was used so many seconds ago."""
    path = folder / name
    (path / "src").mkdir(parents=True)
    (path / "complete").touch()
    for stamped in (path, path / "complete"):
        os.utime(stamped, (time.time() - age,) * 2)
    return path


def test_old_caches_are_listed_and_removed(aenv, home, scripts):
    old = [kept(home / "venvs", "0" * 40, 7200), kept(scripts, "tool-0", 7200)]
    new = [kept(home / "venvs", "1" * 40, 1800), kept(scripts, "tool-1", 1800)]
    for arguments in (("--dry-run",), ()):
        assert all(path.is_dir() for path in old)
        found = aenv("gc", "--unused", "1h", "-o", "json", *arguments).data["found"]
        assert [row["where"] for row in found] == [str(path) for path in old]
    assert not any(path.exists() for path in old)
    assert [path for path in new if path.is_dir()] == new
    assert [*home.glob("venvs/*"), *scripts.iterdir()] == new, "something was left"
    assert aenv("gc", "--unused", "1h", "-o", "json").data["found"] == []


def test_what_was_asked_for_just_now_stays(aenv, home, scripts):
    """Its process may not have begun, or not have copied it."""
    asked = [kept(home / "venvs", "0" * 40, 60), kept(scripts, "tool-0", 60), kept(scripts, ".half", 60)]
    assert aenv("gc", "--unused", "1s", "-o", "json").data["found"] == []
    assert all(path.is_dir() for path in asked)


def test_what_is_needed_again_meanwhile_stays(aenv, home, monkeypatch):
    path = kept(home / "venvs", "0" * 40, 60)
    monkeypatch.setattr(venvs, "unused", lambda age: [path])
    done = aenv("gc", "-o", "json")
    assert (done.code, done.data["found"]) == (0, [])
    assert (path / "complete").exists()


def test_what_is_completed_or_removed_meanwhile_is_passed_over(aenv, scripts, monkeypatch):
    old = kept(scripts, "tool-0", 3600 * 24 * 60)
    glob = type(scripts).glob
    monkeypatch.setattr(type(scripts), "glob", lambda folder, what: [scripts / ".gone", *glob(folder, what)])
    found = aenv("gc", "-o", "json").data["found"]
    assert [row["where"] for row in found] == [str(old)]
