"""From a spec to the container that is asked for, and from what a daemon says to words."""

from __future__ import annotations

import json

import pytest

from aenv.engines.docker import containers
from aenv.engines.docker.containers import Mounted, Site
from aenv.engines.docker.images import Image
from aenv.engines.room import room
from aenv.errors import Invalid
from aenv.models import EnvRef, SandboxSpec, Second, Volume

ENV = EnvRef("probe", "1.0.0")
SITE = Site("lab", "json-file")
NOTHING = Mounted()
ODD = {"a=b": 'c,"d"', "ключ": "знач\n\0\U0001f600", "": ""}


def image(*command: str, **environment: str) -> Image:
    return Image("sha256:1", "probe:1", "amd64", "linux", command, environment, "", "", {})


def spec(**fields):
    return SandboxSpec(env=ENV, **{"image": "probe:1", **fields})


def body(asked, *, site=SITE, mounted=NOTHING, network="none", found=None):
    known = containers.facts("one", asked, 17.5)
    found = found or image("python", "-m", "aenv.runtime", "/app")
    return containers.body(asked, known, found, site=site, mounted=mounted, network=network, key_sha256="ff")


def told(made):
    return dict(pair.split("=", 1) for pair in made["Env"])


def test_a_container_has_no_powers():
    made = body(spec())
    host = made["HostConfig"]
    assert made["User"] == "1000:1000"
    assert host["ReadonlyRootfs"] is True
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert host["NetworkMode"] == "none"
    assert host["IpcMode"] == "private"
    assert host["Mounts"] == []
    assert "Privileged" not in host
    assert "Runtime" not in host
    assert body(spec(), site=SITE._replace(runtime="runsc"))["HostConfig"]["Runtime"] == "runsc"


def test_limits():
    host = body(spec(resources={"cpu": "0.5", "memory": "256Mi", "ephemeralStorage": "1Gi"}))["HostConfig"]
    assert (host["CpuQuota"], host["CpuPeriod"]) == (50_000, 100_000)
    assert host["Memory"] == host["MemorySwap"] == 256 * 1024**2
    assert host["PidsLimit"] == containers.PROCESSES
    assert "size=65536k" in host["Tmpfs"]["/work"]  # which is memory: with /tmp, half of it
    assert host["ShmSize"] == 32 * 1024**2
    small = body(spec(resources={"memory": "256Mi", "ephemeralStorage": "1Mi"}))["HostConfig"]
    assert "size=1024k" in small["Tmpfs"]["/tmp"]
    with pytest.raises(Invalid, match="memory"):
        body(spec(resources={"memory": "0"}))


def test_what_two_share_is_within_what_each_may_write():
    asked = spec(second=Second(image="task:1"), resources={"memory": "1Gi", "ephemeralStorage": "5Gi"})
    share, mounted = room(asked), Mounted("aenv-door-1", link="aenv-link-1", shared="aenv-shared-1")
    host = body(asked, mounted=mounted)["HostConfig"]
    sizes = [int(host["Tmpfs"][place].partition("size=")[2].rstrip("k")) * 1024 for place in ("/tmp", "/work")]
    assert share.shared + sum(sizes) <= host["Memory"] // 2 == share.main // 2
    assert share.shared + share.storage(share.second, 1) <= share.second // 2
    assert min(*sizes, share.shared) > 40 * 1024**2


def test_volumes_of_an_image_are_in_memory_unless_something_is_there():
    found = image("python")._replace(volumes=("/a/", "//b", "c", "/work", "/run/aenv", "/d"))
    made = body(spec(), found=found, mounted=Mounted("aenv-door-1", volumes=[("aenv-volume-1", "/d")]))
    tmpfs = made["HostConfig"]["Tmpfs"]
    assert set(tmpfs) == {"/tmp", "/work", "/a", "/b", "/c", "/run", "/var/tmp"}
    assert len({tmpfs[place] for place in ("/tmp", "/work", "/a", "/b", "/c")}) == 1
    assert made["Healthcheck"] == {"Test": ["NONE"]}


def test_what_is_mounted():
    mounted = Mounted("aenv-door-1", "aenv-project-1", [("aenv-volume-1", "/data")])
    host = body(spec(image="", datasource="/srv/tables"), mounted=mounted)["HostConfig"]
    assert host["VolumesFrom"] == ["aenv-project-1:ro"]
    places = {one["Target"]: one for one in host["Mounts"]}
    assert set(places) == {"/run/aenv", "/data", "/datasource"}
    assert places["/datasource"]["ReadOnly"] is True
    assert "/run/aenv" not in host["Tmpfs"]
    assert "/run/aenv" in body(spec())["HostConfig"]["Tmpfs"]


def test_the_runtime_is_told_by_variables():
    asked = spec(
        environment_variables={"A": "1", "AENV_SOCKET": "/elsewhere", "K": "hidden"},
        secrets=["K"],
        seed=7,
        idle=5.0,
        warm=True,
        datasource="/srv",
        owner_token_sha256="ab",
    )
    found = told(body(asked, site=SITE._replace(until_eof=True)))
    assert (found["A"], found["HOME"]) == ("1", "/tmp")
    assert found["AENV_SOCKET"] == "/run/aenv/runtime.sock"
    assert found["AENV_WORK"] == "/work"
    assert found["AENV_DATASOURCE"] == "/datasource"
    assert (found["AENV_SEED"], found["AENV_IDLE"], found["AENV_WARM"]) == ("7", "5", "1")
    assert (found["AENV_OWNER_TOKEN_SHA256"], found["AENV_ENGINE_TOKEN_SHA256"]) == ("ab", "ff")
    assert (found["AENV_SECRETS"], found["AENV_UNTIL_EOF"]) == ("K", "1")
    assert told(body(spec(idle=5.0, lasting=True)))["AENV_IDLE"] == ""
    assert "HOME" not in told(body(spec(), found=image("python", HOME="/root")))


def test_it_lives_as_long_as_its_standard_input_only_without_a_state():
    assert body(spec())["OpenStdin"] is False
    made = body(spec(), site=SITE._replace(until_eof=True))
    assert made["OpenStdin"] is True
    assert made["StdinOnce"] is True


def test_the_command():
    base = image("python", "-m", "aenv.runtime", "/app", "--host", "0.0.0.0")
    made = body(spec(image="", arguments=["--x", "a b"]), found=base)
    assert made["Entrypoint"] == ["python", "-m", "aenv.runtime"]
    assert made["Cmd"] == ["/aenv/project", "--", "--x", "a b"]
    assert "Entrypoint" not in body(spec())
    made = body(spec(arguments=["x"]))
    assert (made["Entrypoint"], made["Cmd"]) == (["python", "-m", "aenv.runtime", "/app", "--", "x"], [])
    with pytest.raises(Invalid, match="with a shell"):
        body(spec(arguments=["x"]), found=image("/bin/sh", "-c", "python -m aenv.main /app"))
    with pytest.raises(Invalid, match="says nowhere what to run"):
        body(spec(), found=image())


def test_labels_with_any_characters_come_back():
    made = body(spec(labels=ODD, owner="ä d a", secrets=["K"], ttl=60.0))
    assert set(made["Labels"]) == {"aenv.engine", "aenv.id", "aenv.kind", "aenv.spec"}
    back = containers.facts_of(json.loads(json.dumps(made["Labels"])))
    assert back is not None
    assert (back.labels, back.owner, back.ttl, back.created_at) == (ODD, "ä d a", 60.0, 17.5)
    assert containers.facts_of({}) is None
    assert containers.facts_of(None) is None
    assert containers.facts_of({"aenv.spec": "{"}) is None


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"BIG": "x" * 200_000}, "BIG has 200004 bytes; Linux gives a program no variable of more than 131071"),
        ({f"V{n}": "x" * 100_000 for n in range(21)}, "is the most that Linux gives a program"),
        ({"A=B": "x"}, "'A=B' cannot be a variable"),
        ({"": "x"}, "cannot be a variable"),
        ({"A": "x\0y"}, "'A' cannot be a variable"),
    ],
)
def test_variables_that_no_program_can_have(variables, message):
    with pytest.raises(Invalid, match=message):
        body(spec(environment_variables=variables))


def test_many_variables_are_fine():
    asked = spec(environment_variables={f"V{n}": "x" * 20_000 for n in range(10)})
    assert len(told(body(asked))["V9"]) == 20_000


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"network": {"allow": ["example.org"]}}, Invalid, "cannot be allowed"),
        ({"network": {"deny": ["example.org:443"]}}, Invalid, "is not a network"),
        ({"network": "host"}, Invalid, "is not a network"),
        ({"datasource": "tables"}, Invalid, "not an absolute path"),
        *(
            ({"volumes": [Volume(owner="o", name="v", mount=mount, size=2**20)]}, Invalid, "which sandboxes need")
            for mount in ("/", "/work/data", "/run", "/aenv", "/usr/lib", "/tmp")
        ),
    ],
)
def test_what_no_container_can_be(fields, kind, message):
    with pytest.raises(kind, match=message):
        containers.check(spec(**fields))


def test_what_a_container_can_be():
    containers.check(spec(network="full", volumes=[Volume(owner="o", name="v", mount="/home/admin/data", size=2**20)]))


def state(**fields):
    return {"State": {"Status": "exited", "FinishedAt": "2026-01-02T03:04:05.5Z", **fields}}


def test_how_it_ended():
    assert containers.ended({"State": {"Status": "running"}}) is None
    assert containers.ended({"State": {"Status": "created"}}) is None
    well = containers.ended(state(ExitCode=0))
    assert well.well
    assert well.at == containers.moment("2026-01-02T03:04:05Z") + 0.5
    code = containers.ended(state(ExitCode=3))
    assert not code.well
    assert code.told(2**20, "last\nwords") == "it ended with exit code 3; it printed last:\nlast\nwords"
    assert code.told(2**20, " ") == "it ended with exit code 3, and printed nothing"
    memory = containers.ended(state(ExitCode=137, OOMKilled=True))
    much = "out of memory: it took more than the 128 MiB it may have"
    assert memory.told(128 * 2**20, "") == f"{much}, and printed nothing"
    assert much in containers.ended(state(ExitCode=137)).told(128 * 2**20, "")
    assert containers.ended(state(ExitCode=139)).told(0, "").startswith("signal 11 ended it")
    assert "(no such device)" in containers.ended(state(ExitCode=128, Error="no such device")).told(0, "")


def test_times_of_the_daemon():
    assert containers.moment("0001-01-01T00:00:00Z") == 0.0
    assert containers.moment("") == containers.moment("soon") == 0.0
    assert containers.moment("1970-01-01T00:01:00.25Z") == containers.moment("1970-01-01T00:01:00.25") == 60.25
    assert containers.moment("1970-01-01T02:01:00.250000001+02:00") == 60.25
    assert containers.moment("1969-12-31T19:01:00-05:00") == 60.0


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("exec /usr/bin/python: exec format error", "another kind of processor"),
        ('exec: "python": executable file not found in $PATH: unknown', "cannot run its command"),
        ("argument list too long", "more than Linux gives a program"),
        ("something else", "something else"),
    ],
)
def test_why_it_did_not_start(message, words):
    assert words in containers.start_failure(message, "probe:1")[0]
