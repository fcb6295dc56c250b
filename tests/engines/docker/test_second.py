"""The second container on real daemons: what is in it, how both live and end together, why it is not to be had, and
what is left."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from aenv import agent
from aenv.engines import conformance, load_engine
from aenv.engines.conformance import projects
from aenv.engines.docker import doors, sweeping
from aenv.engines.docker import engine as engines
from aenv.engines.docker import second as module
from aenv.engines.docker.engine import DockerEngine
from aenv.errors import AEnvError, Invalid, NotFound, SandboxLost, StartFailed, Unsupported
from aenv.models import Second, State
from tests.engines.docker.beside import dual, imported, inspected, kill, run, tar
from tests.engines.docker.lab import Harbour, call, killed, of_image, over, probe, python

# What is in it


async def test_both_run_and_nothing_is_left(harbour: Harbour, image: str) -> None:
    async with harbour.engine() as engine:
        made = await engine.create("one", dual(image))
        assert made.state is State.RUNNING
        assert await run(made, "echo hello") == "hello\n"
        assert await call(made, "echo", text="main") == "main"
        assert len(await harbour.left()) >= 4  # two containers, and what they share
        await engine.delete("one")
        assert await harbour.left() == []
        with pytest.raises(AEnvError):
            await run(made, "true")


async def test_a_sandbox_without_one_has_none(harbour: Harbour) -> None:
    async with harbour.engine() as engine:
        made = await engine.create("one", probe())
        with pytest.raises(AEnvError, match="no second container"):
            await run(made, "true")
        assert not [name for name in await harbour.left() if "aenv2" in name or "link" in name or "shared" in name]


async def test_what_it_may_do(harbour: Harbour, image: str) -> None:
    async with harbour.engine() as engine:
        made = await engine.create("one", dual(image, resources={"memory": "1Gi", "cpu": "0.5"}))
        text = await run(made, "cat /proc/self/status")
        status = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
        assert status["Uid"].split() == ["0"] * 4
        powers = {name: int(status[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapInh")}
        assert powers["CapEff"] == powers["CapPrm"] == powers["CapBnd"] == 0b10011101011
        assert powers["CapInh"] in (0, powers["CapBnd"])  # older daemons
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        limits = (await inspected(harbour, "one"))["HostConfig"]
        main = (await harbour.daemon.ask("GET", f"/containers/aenv-{harbour.state}-one/json"))["HostConfig"]
        assert (limits["Memory"], main["Memory"]) == (768 * 2**20, 256 * 2**20)
        assert limits["PidsLimit"] == 512
        assert limits["CpuQuota"] == 50_000
        mounts = [line.split()[:5] for line in (await run(made, "cat /proc/mounts")).splitlines()]
        places = {place for _, place, *_ in mounts}
        assert {"/tmp", "/shared", "/aenv/link", "/aenv/agent"} <= places
        assert not [place for place in places if "docker.sock" in place or "podman" in place]
        assert {place: options for _, place, _, options, *_ in mounts}["/aenv/agent"].startswith("ro,")
        assert re.search("Read-only", (await call(made, "second", command="echo x > /aenv/agent/x"))["stderr"])


async def test_root_in_it_can_do_what_package_managers_do(harbour: Harbour, image: str) -> None:
    async with harbour.engine() as engine:
        made = await engine.create("one", dual(image))
        lines = (
            "busybox mkdir -p /var/lib/x /etc && echo data > /var/lib/x/file",
            "busybox chown -R 33:33 /var/lib/x && busybox chmod 700 /var/lib/x && echo more > /var/lib/x/file",
            "echo root:x:0:0::/:/bin/sh > /etc/passwd && echo ada:x:7:7::/home/ada:/bin/sh >> /etc/passwd",
            "busybox mkdir -p /home/ada && busybox chown 7:7 /home/ada",
            "busybox su ada -c 'busybox test $(id -u) = 7 && echo mine > /home/ada/file'",
            "busybox su ada -c 'exec sleep 1000' & busybox usleep 200000; kill $!",
            "busybox httpd -f -p 80 & busybox usleep 200000; kill $!",
            "busybox rm -rf /home/ada /var/lib/x",
        )
        for line in lines:
            await run(made, line)


async def test_the_image_is_as_it_is(harbour: Harbour, busybox: bytes, program: Path) -> None:
    changes = ("USER 1234:1234", "ENV FOO=bar", "WORKDIR /bin", 'ENTRYPOINT ["/no/such"]', "VOLUME /data")
    async with imported(harbour.address, busybox, *changes) as image, harbour.engine() as engine:
        made = await engine.create("one", dual(image, environment_variables={"PROBE_VALUE": "mine"}))
        text = await run(made, "busybox pwd; busybox env; id -u")
        lines = text.splitlines()
        assert (lines[0], lines[-1]) == ("/bin", "1234")
        assert "FOO=bar" in lines
        assert "PROBE_VALUE" not in text
        status = await run(made, "cat /proc/self/status")
        assert re.search(r"CapEff:\s0+\n", status)
        await engine.delete("one")
        assert await harbour.left() == []


async def test_an_image_with_another_c_library_and_no_shell(harbour: Harbour, musl: bytes, program: Path) -> None:
    async with imported(harbour.address, musl) as image, harbour.engine() as engine:
        made = await engine.create("one", dual(image))
        done = await call(made, "second", command=["/bin/hello", "x"], given="typed")
        assert (done["stdout"], done["returncode"]) == ("2 0 typed", 7)


async def test_networks(harbour: Harbour, image: str) -> None:
    async with harbour.engine() as engine:
        none = await engine.create("none", dual(image, network="none"))
        full = await engine.create("full", dual(image, network="full"))
        assert "eth0" not in await run(none, "cat /proc/net/dev")
        assert "eth0" in await run(full, "cat /proc/net/dev")


async def test_nobody_answers_in_the_place_of_the_agent(harbour: Harbour, image: str) -> None:
    async with harbour.engine() as engine:
        made = await engine.create("one", dual(image))
        for line in ("busybox rm /aenv/link/second.sock", "busybox mv /aenv/link/second.sock /aenv/link/x"):
            done = await call(made, "second", command=line)
            if not done["returncode"]:
                pytest.skip("this kernel cannot protect a directory in memory from root")
        for line in ("echo > /aenv/link/new", "busybox chmod 777 /aenv/link", "busybox umount /aenv/link"):
            assert (await call(made, "second", command=line))["returncode"] != 0, line
        code, text = await harbour.run(engine, "one", *python("open('/aenv/link/new', 'w')"))
        assert code == 1
        assert re.search("Read-only|Permission", text)
        assert await run(made, "echo well") == "well\n"


async def test_a_tunnel_where_volumes_are_not_seen(
    harbour: Harbour, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "outlook", lambda daemon, about: None)
    async with harbour.engine() as engine:
        made = await engine.create("one", dual(image))
        assert await run(made, "echo hello") == "hello\n"
        await engine.delete("one")
        assert await harbour.left() == []


async def test_what_both_use_is_counted(harbour: Harbour, image: str) -> None:
    async with harbour.engine() as engine:
        made = await engine.create("one", dual(image))
        before = await engine.used("one")
        await run(made, "n=0; while [ $n -lt 300000 ]; do n=$((n+1)); done")
        await run(made, "busybox dd if=/dev/zero of=/tmp/x bs=1M count=64")
        after = await engine.used("one")
        assert after.cpu > before.cpu + 0.05
        assert after.memory > before.memory + 48 * 2**20


async def test_a_warm_one_has_it_from_the_start(harbour: Harbour, image: str) -> None:
    async with harbour.engine() as engine:
        made = await engine.create("one", dual(image, warm=True))
        assert made.state is State.RUNNING
        assert (await inspected(harbour, "one"))["State"]["Running"]


# What it writes is bounded


async def test_what_is_shared_holds_no_more_than_it_may(harbour: Harbour, image: str) -> None:
    resources = {"memory": "512Mi", "ephemeralStorage": "8Mi"}
    async with harbour.engine() as engine:
        made = await engine.create("one", dual(image, resources=resources))
        for place in ("/shared/big", "/tmp/big"):
            done = await call(made, "second", command=f"busybox dd if=/dev/zero of={place} bs=1M count=32")
            assert "No space left" in done["stderr"], place
        code, text = await harbour.run(engine, "one", *python("open('/shared/more', 'wb').write(bytes(2**20))"))
        assert (code, "No space left" in text) == (1, True)
        await run(made, "busybox rm /shared/big /tmp/big")
        assert await call(made, "echo", text="still here") == "still here"


async def test_a_root_that_grows_too_large_ends_it(
    harbour: Harbour, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_WEIGH", 0.2)
    async with harbour.engine() as engine:
        made = await engine.create("one", dual(image, resources={"ephemeralStorage": "8Mi"}))
        done = await call(made, "second", command="busybox dd if=/dev/zero of=/one bs=1M count=32")
        if "No space left" not in done["stderr"]:  # where the daemon cannot limit it itself
            with suppress(AEnvError):
                await call(made, "second", command="for n in 1 2 3 4; do busybox dd if=/one of=/more$n bs=1M; done")
            found = await over(engine, "one")
            assert found.state is State.FAILED
            assert re.search(r"the second container wrote \d+ MiB, and may have 8 MiB", found.reason)
        await engine.delete("one")
        assert await harbour.left() == []


# How both end


async def test_one_that_dies_fails_the_sandbox(harbour: Harbour, image: str) -> None:
    async with harbour.engine() as engine:
        made = await engine.create("one", dual(image))
        await kill(harbour, module.name(harbour.state, "one"))
        found = await over(engine, "one")
        assert found.state is State.FAILED
        assert "signal 9 ended the second container" in found.reason
        with pytest.raises(SandboxLost):
            await engine.exec("one", ["true"])
        await harbour.gone("aenv2")
        with pytest.raises(AEnvError):
            await call(made, "echo", text="x")
        await engine.delete("one")
        assert await harbour.left() == []


async def test_it_goes_when_the_main_one_ends(harbour: Harbour, image: str) -> None:
    async with harbour.engine() as engine:
        made = await engine.create("one", dual(image))
        with suppress(AEnvError):
            await call(made, "crash", code=3)
        found = await over(engine, "one")
        assert (found.state, "it ended with exit code 3" in found.reason) == (State.FAILED, True)
        await harbour.gone("aenv2")
        await engine.delete("one")
        assert await harbour.left() == []


async def test_it_goes_when_its_time_is_over(harbour: Harbour, image: str) -> None:
    async with harbour.engine() as engine:
        await engine.create("one", dual(image))
        await engine.update("one", ttl=0.1)
        assert (await over(engine, "one")).state is State.TERMINATED
        await engine.delete("one")
        assert await harbour.left() == []


async def test_found_again(harbour: Harbour, image: str) -> None:
    async with harbour.engine() as engine:
        made = await engine.create("one", dual(image))
        await run(made, "echo kept > /kept")
        await engine.create("two", dual(image))
        await engine.create("three", dual(image))
        await engine.create("four", dual(image))
    await kill(harbour, module.name(harbour.state, "two"))
    for gone in (f"aenv-{harbour.state}-three", module.name(harbour.state, "four")):
        await harbour.daemon.ask("DELETE", f"/containers/{gone}", query={"force": "1", "v": "1"})
    async with harbour.engine() as later:
        found = {sandbox.id: sandbox for sandbox in await later.find()}
        assert set(found) == {"one", "two", "four"}
        assert found["one"].state is State.RUNNING
        assert await run(found["one"], "cat /kept") == "kept\n"
        two = await over(later, "two")
        assert (two.state, "ended the second container" in two.reason) == (State.FAILED, True)
        assert "the second container was removed" in (await over(later, "four")).reason
        await harbour.gone("three")  # which has lost its main container
        await kill(harbour, module.name(harbour.state, "one"))  # whoever found it watches it
        assert (await over(later, "one")).state is State.FAILED
        for id in ("one", "two", "three", "four"):
            await later.delete(id)
        assert await harbour.left() == []


async def test_both_end_with_a_process_that_is_killed(harbour: Harbour, image: str, home: Path) -> None:
    name = await killed(harbour, home, f"dual({image!r})")
    for container in (f"aenv-{name}-one", module.name(name, "one")):
        await harbour.stopped(container)
    told = [left.name for left in await sweeping.sweep(harbour.daemon, unused=1e9, dry_run=True) if name in left.name]
    assert sorted(told) == sorted([f"aenv-{name}-one", module.name(name, "one")])
    async with harbour.engine() as engine:
        await engine.find()
        await harbour.gone(label=f"aenv.engine={name}")


async def test_without_a_state_nothing_outlives_the_engine(harbour: Harbour, image: str) -> None:
    async with harbour.engine(state="") as engine:
        await engine.create("one", dual(image))
        label = f"aenv.engine={engine._engine}"
        assert len(await harbour.left(label)) >= 4
    assert await harbour.left(label) == []


# Why it is not to be had


async def test_an_image_that_is_nowhere(harbour: Harbour, program: Path) -> None:
    async with harbour.engine() as engine:
        with pytest.raises((StartFailed, Invalid), match="no-such-image"):
            await engine.create("one", dual("127.0.0.1:1/no-such-image:1"))
        assert (await engine.get("one")).state is State.FAILED
        await engine.delete("one")
        assert await harbour.left() == []


async def test_an_image_for_another_machine(harbour: Harbour, busybox: bytes, program: Path) -> None:
    other = "arm64" if (await harbour.daemon.about()).architecture == "amd64" else "amd64"
    async with imported(harbour.address, busybox, platform=f"linux/{other}") as image, harbour.engine() as engine:
        if (await harbour.daemon.ask("GET", f"/images/{image}/json"))["Architecture"] != other:
            pytest.skip("this daemon imports images for its own kind of machine only")
        with pytest.raises(Invalid, match=f"is for {other} processors"):
            await engine.create("one", dual(image))
        await engine.delete("one")
        assert await harbour.left() == []


async def test_an_image_that_has_no_room_for_the_agent(harbour: Harbour, program: Path) -> None:
    async with imported(harbour.address, tar({"aenv": b"a file"})) as image, harbour.engine() as engine:
        with pytest.raises(StartFailed, match="the second container"):
            await engine.create("one", dual(image))
        await engine.delete("one")
        assert await harbour.left() == []


async def test_one_that_ends_at_once(harbour: Harbour, image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = module.body

    def ends(*args: Any, **options: Any) -> dict[str, Any]:
        made = bodies(*args, **options)
        return {**made, "Entrypoint": [made["Entrypoint"][0]]}

    monkeypatch.setattr(module, "body", ends)
    async with harbour.engine() as engine:
        with pytest.raises(StartFailed, match="the second container ended with exit code 2") as caught:
            await engine.create("one", dual(image))
        assert "usage: aenv-agent" in str(caught.value)
        assert (await engine.get("one")).state is State.FAILED
        await engine.delete("one")
        assert await harbour.left() == []


async def test_a_start_that_is_given_up_leaves_nothing(harbour: Harbour, image: str) -> None:
    async with harbour.engine() as engine:
        for pause in (0.0, 0.05, 0.2, 0.5):
            begun = time.monotonic()
            creating = asyncio.create_task(engine.create("one", dual(image)))
            await asyncio.sleep(pause)
            creating.cancel()
            await asyncio.gather(creating, return_exceptions=True)
            if not creating.cancelled():  # it was up before
                await engine.delete("one")
            assert await harbour.left() == [], f"after {time.monotonic() - begun:.2f} s"


async def test_a_main_one_that_fails_leaves_nothing(harbour: Harbour, image: str) -> None:
    async with harbour.image(*python("raise SystemExit('broken')")) as main, harbour.engine() as engine:
        with pytest.raises(StartFailed, match="broken"):
            await engine.create("one", of_image(main, second=Second(image=image)))
        await engine.delete("one")
        assert await harbour.left() == []


async def test_a_directory_is_refused(harbour: Harbour, tmp_path: Path) -> None:
    engine: DockerEngine = harbour.engine()
    with pytest.raises(Unsupported, match="from a directory") as caught:
        engine.check_second(Second(directory=str(tmp_path)))
    assert "image" in str(caught.value.hint)
    engine.check_second(Second(image="x"))
    engine.check_second(None)


async def test_the_agent_is_brought_once_and_again_when_it_is_gone(harbour: Harbour, image: str) -> None:
    async with harbour.engine() as engine:
        await engine.create("one", dual(image))
        keeper = (await inspected(harbour, "one"))["Config"]["Labels"][module.USES]
        await engine.create("two", dual(image))
        assert (await inspected(harbour, "two"))["Config"]["Labels"][module.USES] == keeper
        assert engine._host is not None
        engine._host.seconds.agents.keepers._filled.discard(keeper)
        engine._host.seconds.agents.keepers._filled.add("aenv-agent-of-another")
        assert await engine._host.seconds.agents.is_gone("aenv-agent-of-another")
        assert not await engine._host.seconds.agents.is_gone(keeper)


@pytest.mark.parametrize("state", [None, ""])
async def test_what_is_taken_for_unused_before_a_container_runs_is_brought_again(
    harbour: Harbour, image: str, compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str | None
) -> None:
    # Of nobody else, since it is removed: an agent, and a project.
    mine, project = tmp_path / "agent", tmp_path / "probe"
    mine.write_bytes(compiled.read_bytes() + harbour.state.encode())
    monkeypatch.setattr(agent, "binary", lambda architecture=None: mine)
    shutil.copytree(projects.PROBE, project)
    (project / "mark.txt").write_text(harbour.state)
    gone: dict[str, str] = {}
    async with harbour.engine(state=state) as engine:
        daemon = (await engine._open()).daemon
        ask = daemon.ask

        async def late(method: str, path: str, **options: Any) -> Any:
            if path.endswith("/start") and path not in gone:
                found = await ask("GET", path.removesuffix("start") + "json")
                gone[path] = found["Config"]["Labels"][module.USES]
                await ask("DELETE", f"/containers/{gone[path]}", query={"force": "1", "v": "1"})
            return await ask(method, path, **options)

        monkeypatch.setattr(daemon, "ask", late)
        made = await engine.create("one", probe(project, second=Second(image=image)))
        assert len(gone) == 2
        assert await call(made, "echo", text="main") == "main"
        assert await run(made, "echo hello") == "hello\n"
        await engine.delete("one")
        assert await harbour.left(f"aenv.engine={engine._engine}") == []
    for keeper in gone.values():
        for path in (f"/containers/{keeper}", f"/images/{module.agent_image(keeper)}"):
            with suppress(NotFound):
                await harbour.daemon.ask("DELETE", path, query={"force": "1"})


# What both print


async def test_what_the_second_one_prints_is_marked(harbour: Harbour, image: str) -> None:
    bodies = module.body
    with pytest.MonkeyPatch.context() as patch:

        def talks(*args: Any, **options: Any) -> dict[str, Any]:
            made = bodies(*args, **options)
            line = 'echo one; echo two >&2; exec "$@"'
            return {**made, "Entrypoint": ["/bin/sh", "-c", line, "sh", *made["Entrypoint"]]}

        patch.setattr(module, "body", talks)
        async with harbour.engine() as engine:
            made = await engine.create("one", dual(image))
            await call(made, "say", text="main")
            for _ in range(2):
                lines = [line async for line in engine.logs("one")]
                assert sorted(line for line in lines if line.startswith("second: ")) == ["second: one", "second: two"]
                assert "main to stdout" in lines
            await kill(harbour, module.name(harbour.state, "one"))
            reason = (await over(engine, "one")).reason
            assert "it printed last:" in reason
            assert {"one", "two"} <= set(reason.splitlines())
            assert "second: one" in [line async for line in engine.logs("one")]


# The list that every engine must pass


async def test_the_conformance_list(daemon: str, base_image: str, home: Path, image: str) -> None:
    names = [check.name for check in conformance.CHECKS if check.needs == "second"]

    def make() -> Any:
        return load_engine("docker", address=daemon, state="second", base_image=base_image)

    async with make() as engine:
        results = await conformance.run(engine, only=names, another=make, limit=300, at_once=2, second=image)
        assert {result.name: result.detail for result in results if result.status != "pass"} == {}
