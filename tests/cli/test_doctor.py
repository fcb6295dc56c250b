"""``aenv doctor`` and ``aenv version``."""

import os
import platform
import socket
import sys

import pytest

from aenv import __version__
from aenv.cli import doctor
from aenv.engines.process import loops, powers


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
    monkeypatch.setenv("AENV_DOCKER_HOST", f"unix://{tmp_path}/no.sock")
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


def test_no_daemon_of_containers(aenv, no_programs):
    row = checks(aenv("doctor", "-o", "json"))["docker"]
    assert row["status"] == "warn"
    assert "neither Docker nor Podman answers" in row["detail"]
    assert "no.sock" in row["detail"]
    assert row["fix"] == "start Docker or Podman, or set AENV_DOCKER_HOST"


def test_whether_services_can_keep_something(aenv, no_programs, monkeypatch):
    found = powers.Powers(privileged=True, namespaces=True, overlay=True, cgroups=True, seccomp=True)
    monkeypatch.setattr(powers, "probe", lambda: found)
    monkeypatch.setattr(loops, "missing", lambda: "")
    assert checks(aenv("doctor", "-o", "json"))["volumes"]["status"] == "ok"
    monkeypatch.setattr(loops, "missing", lambda: "there is no /dev/loop-control")
    row = checks(aenv("doctor", "-o", "json"))["volumes"]
    assert (row["status"], row["fix"]) == ("warn", loops.HINT)
    assert "there is no /dev/loop-control" in row["detail"]


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


def test_what_a_sandbox_can_have_here_is_shown_with_a_way_to_have_more(aenv, no_programs):
    answer = aenv("doctor", "-o", "json")
    rows = [row for row in answer.data["checks"] if row["check"].startswith("isolation")]
    assert rows
    assert all(row["status"] == "ok" or (row["status"] == "warn" and row["fix"]) for row in rows)


def test_the_platform_that_is_configured(aenv, no_programs, monkeypatch):
    assert "no platform is configured" in checks(aenv("doctor", "-o", "json"))["remote"]["detail"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    monkeypatch.setenv("AENV_SYSTEM_URL", url)
    answer = aenv("doctor", "-o", "json")
    assert (answer.code, answer.data["ok"]) == (1, False)
    row = checks(answer)["remote"]
    assert row["status"] == "fail"
    assert row["detail"].startswith(f"{url} (from environment variable AENV_SYSTEM_URL): the platform at {url} cannot")
    assert row["fix"]


# An engine


PLAIN = "aenv.engines.plain:PlainEngine"


def test_an_engine_that_passes(aenv):
    answer = aenv("doctor", "--engine", PLAIN, "--check", "create", "--check", "tmp-apart", "-o", "json")
    assert answer.code == 0
    assert (answer.data["ok"], answer.data["engine"]) == (True, PLAIN)
    assert {row["name"]: row["status"] for row in answer.data["checks"]} == {"create": "pass", "tmp-apart": "skip"}
    assert all(row["detail"] for row in answer.data["checks"])
    assert sorted(line.split()[1:] for line in answer.err.splitlines()) == [["pass", "create"], ["skip", "tmp-apart"]]


@pytest.mark.parametrize(
    ("given", "told"), [("debian:12", "(debian:12)"), ("./task", "{here}/task)"), (None, "was given")]
)
def test_what_second_containers_are_made_of(aenv, here, given, told):
    second = [] if given is None else ["--second", given]
    answer = aenv("doctor", "--engine", PLAIN, "--check", "second-runs-commands", *second, "-o", "json")
    assert answer.code == 0, answer.err
    (row,) = answer.data["checks"]
    assert row["status"] == "skip"
    assert told.format(here=here) in row["detail"]


def test_an_engine_that_fails(aenv):
    checks = ("--check", "create", "--check", "get-unknown")
    answer = aenv("doctor", "--engine", "aenv.engines.failing:FailingEngine", *checks)
    assert answer.code == 1
    rows = [line.split(maxsplit=2) for line in answer.out.splitlines()]
    assert rows[0] == ["NAME", "STATUS", "DETAIL"]
    assert rows[1] == ["create", "fail", "StartFailed: this engine fails on purpose"]
    assert rows[2][:2] == ["get-unknown", "pass"]
    assert "fail create: StartFailed: this engine fails on purpose" in answer.err
    assert "checks: 2, failed: 1, skipped: 0" in answer.err
    answer = aenv("doctor", "--engine", "aenv.engines.failing:FailingEngine", *checks, "-o", "json")
    assert (answer.code, answer.data["ok"]) == (1, False)


def test_an_engine_that_is_being_written_here(aenv, here, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (here / "engine_of_mine.py").write_text(
        "import os\nfrom aenv.engines.failing import PaperEngine\n"
        "class Mine(PaperEngine):\n"
        "    async def get(self, id):\n"
        "        os.write(1, b'talking')\n"
        "        return await super().get(id)\n"
    )
    answer = aenv("doctor", "--engine", "engine_of_mine:Mine", "--check", "get-unknown", "-o", "json")
    assert (answer.code, answer.data["checks"][0]["status"]) == (0, "pass")
    assert "talking" in answer.err


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--engine", "proces"], 1, "did you mean 'process'?"),
        (["--engine", "no_such_module:Engine"], 1, "use pkg.mod:Class"),
        (["--engine", "aenv.engines.failing:PaperEngine", "--check", "creat"], 1, "did you mean 'create'?"),
        (["--check", "create"], 2, "needs --engine"),
        (["--second", "debian"], 2, "needs --engine"),
    ],
)
def test_an_engine_or_a_check_that_is_not_there(aenv, arguments, code, said):
    answer = aenv("doctor", *arguments)
    assert (answer.code, answer.out) == (code, "")
    assert said in answer.err
