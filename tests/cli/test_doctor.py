"""``aenv doctor`` and ``aenv version``."""

import os
import platform
import socket

import pytest

from aenv import __version__
from aenv.cli import doctor


def test_version(aenv):
    assert aenv("version", "-o", "json").data == {
        "aenvironment": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    assert aenv("version").out.startswith(f"aenvironment {__version__}\npython ")


def checks(answer):
    return {row["check"]: row for row in answer.data["checks"]}


def program(folder, name, script):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def no_programs(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "bin"


def test_a_machine_without_node_and_docker_can_still_run_environments(aenv, no_programs):
    answer = aenv("doctor", "-o", "json")
    assert (answer.code, answer.data["ok"]) == (0, True)
    rows = checks(answer)
    assert rows["python"]["status"] == "ok"
    assert rows["aenvironment"]["detail"] == __version__
    assert (rows["node"]["status"], rows["docker"]["status"]) == ("warn", "warn")
    assert all(row["fix"] for row in rows.values() if row["status"] != "ok")
    assert "failed: 0" in aenv("doctor").err


@pytest.mark.parametrize(
    ("answer", "status"), [("v22.19.0", "ok"), ("v20.1.0", "warn"), ("v22.18.9", "warn"), ("oops", "warn")]
)
def test_the_version_of_node(aenv, no_programs, answer, status):
    program(no_programs, "node", f"echo {answer}")
    program(no_programs, "npx", "exit 0")
    assert checks(aenv("doctor", "-o", "json"))["node"]["status"] == status


def test_docker_with_and_without_a_server(aenv, no_programs):
    program(no_programs, "docker", "exit 1")
    assert "no server answers" in checks(aenv("doctor", "-o", "json"))["docker"]["detail"]
    program(no_programs, "docker", "echo 29.1.0")
    assert checks(aenv("doctor", "-o", "json"))["docker"] == {
        "check": "docker",
        "status": "ok",
        "detail": "server 29.1.0",
        "fix": "",
    }


def test_a_port_in_use(aenv, no_programs, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(doctor, "PORT", taken.getsockname()[1])
        row = checks(aenv("doctor", "-o", "json"))[f"port {doctor.PORT}"]
    assert row["status"] == "warn"
    assert "--port" in row["fix"]


def test_a_home_that_is_a_file_and_a_broken_config_fail(aenv, home, no_programs):
    home.write_text("")
    answer = aenv("doctor", "-o", "json")
    assert (answer.code, answer.data["ok"]) == (1, False)
    assert checks(answer)["home"]["status"] == "fail"
    os.unlink(home)
    home.mkdir()
    (home / "config.json").write_text("[]")
    answer = aenv("doctor", "-o", "json")
    assert answer.code == 1
    assert checks(answer)["home"]["status"] == "ok"
    assert checks(answer)["config"]["status"] == "fail"


def test_a_doctor_makes_nothing(aenv, home, no_programs):
    aenv("doctor")
    assert not home.exists()
