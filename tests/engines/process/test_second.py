"""Second sandboxes: a task's directory beside an instance, in which commands run for it. What they see, what they
share, how they end, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
from pathlib import Path

import msgspec
import pytest

from aenv import Environment, agent
from aenv.client.local import Embedded
from aenv.engines.process import loops
from aenv.engines.process.engine import ProcessEngine
from aenv.errors import AEnvError, Conflict, Invalid, StartFailed, Unsupported
from aenv.models import Second, State, Volume
from tests.engines.process import dual, lab
from tests.engines.process.lab import eventually, over


@pytest.fixture(scope="session")
def cached(tmp_path_factory):
    """The agent, compiled once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AENV_HOME", str(tmp_path_factory.mktemp("agent")))
        try:
            return dual.compiled()
        except Unsupported as exc:
            pytest.skip(f"needs the agent of second sandboxes: {exc.message}")


@pytest.fixture
def duals(jailed, tmp_path, home, cached):
    return dual.Duals(tmp_path, home, cached)


@pytest.fixture
async def box(jail, duals):
    return await duals.start(jail, "one", duals.task())


# Commands and files


async def test_commands_have_streams_codes_and_input(box):
    done = await box.run("echo out; echo err >&2; exit 7")
    assert (done["code"], done["out"], done["err"], done["late"]) == (7, "out\n", "err\n", False)
    assert (await box.run("cat", input="typed\n"))["out"] == "typed\n"
    assert (await box.run("kill -9 $$"))["code"] == -signal.SIGKILL
    assert sorted(await box.call("listing", path="/task")) == ["file.txt", "private.txt"]


async def test_a_command_that_takes_too_long_is_killed_with_what_it_started(box):
    done = await box.run("sleep 1000 & echo $!; sleep 1000", timeout=0.5)
    assert done["late"]
    assert done["code"] == -signal.SIGKILL
    assert await box.out(f"test -e /proc/{done['out'].strip()} || echo gone") == "gone\n"


async def test_a_terminal(box):
    assert "42" in await box.call("typed", line="echo $((6*7)); test -t 0 && echo yes")


async def test_files_go_both_ways(box):
    assert await box.call("read", path="/task/file.txt") == "original\n"
    await box.call("write", path="new/deep/file.txt", text="made")
    assert await box.out("cat /task/new/deep/file.txt") == "made"
    with pytest.raises(AEnvError, match="cannot be read"):
        await box.call("read", path="/task/missing")
    with pytest.raises(AEnvError, match="cannot be written"):
        await box.call("write", path="/usr/new", text="no")


# What it sees


async def test_it_sees_the_task_and_the_programs_of_this_machine(box):
    assert await box.out("pwd; hostname; echo $HOME") == "/task\nsecond\n/home/sandbox\n"
    assert await box.out("cat file.txt private.txt") == "original\nmine\n", "what is the owner's is its own"
    places = "for place in /usr /etc / /aenv; do touch $place/x 2>/dev/null && echo $place; done; true"
    assert await box.out(places) == ""
    writable = "for place in /task /tmp /home/sandbox /dev/shm /shared; do touch $place/x && echo $place; done"
    assert await box.out(writable) == "/task\n/tmp\n/home/sandbox\n/dev/shm\n/shared\n"


async def test_the_base_image_is_this_machines_programs_in_a_root_of_its_own(jail, duals):
    box = await duals.start(jail, "one", "aenv-base")
    assert await box.out("pwd; echo $HOME; ls -A /root /task 2>/dev/null; true") == "/\n/root\n/root:\n"
    assert await box.out("mkdir -p /app /logs/verifier && echo 7 > /app/a && cat /app/a") == "7\n"
    assert await box.out("echo '#!/bin/sh\necho ran' > /opt/x && chmod +x /opt/x && /opt/x") == "ran\n"
    places = "/usr /usr/bin /bin /lib /etc"
    assert await box.out(f"for place in {places}; do touch $place/x 2>/dev/null && echo $place; done; true") == ""
    moved = "mv $place /other 2>/dev/null || rm -r $place 2>/dev/null && echo $place"
    assert await box.out(f"for place in {places}; do {moved}; done; true") == "", "nor put another in its place"
    two = await duals.start(jail, "two", "aenv-base")
    assert await two.out("ls -d /app /logs 2>/dev/null; true") == ""


async def test_no_other_image_is_made(jail, duals):
    with pytest.raises(Unsupported, match="cannot make a second container"):
        await duals.start(jail, "one", "debian")


async def test_the_tasks_directory_stays_as_it_is_and_each_instance_has_its_own_changes(jail, duals, family):
    task = duals.task()
    one, two = [await duals.start(jail, id, task) for id in ("one", "two")]
    await one.out("echo changed > file.txt; rm private.txt; mkdir new; chmod 700 .")
    assert await two.out("cat file.txt private.txt; ls") == "original\nmine\nfile.txt\nprivate.txt\n"
    assert (task / "file.txt").read_text() == "original\n"
    assert sorted(path.name for path in task.iterdir()) == ["file.txt", "private.txt"]
    await duals.start(jail, "three", duals.task("other", **{"a.txt": "a"}))
    assert len(family.zygotes()) == 1, "tasks have their zygote in common"


async def test_both_sandboxes_write_what_they_share(box):
    await box.out("umask 077; echo second > /shared/a; mkdir /shared/deep; echo second > /shared/deep/b")
    assert await box.call("own", path="/shared/a", text="main\n") == "second\nmain\n"
    assert await box.call("own", path="/shared/deep/c", text="main\n") == "main\n"
    assert await box.out("cat /shared/a; echo more >> /shared/deep/c; rm /shared/deep/c /shared/a") == "second\nmain\n"
    done = await box.run("chmod 700 /shared")
    assert done["code"] != 0, "neither can shut the other out"
    await box.out("ln -s /project/config.json /shared/link; ln -s /etc/passwd /shared/other")
    assert await box.out("test -e /shared/link || echo nothing there") == "nothing there\n"


async def test_nothing_of_the_instance_is_in_it(jail, duals):
    given = duals.spec(duals.task(), environment_variables={"TASK_KEY": "hidden-7261"}, arguments=["--secret-argument"])
    box = dual.Box(await jail.create("one", given))
    assert "hidden-7261" not in await box.out("env; cat /proc/*/environ 2>/dev/null; true")
    assert await box.out("ls -A /project /runtime /venv /datasource 2>/dev/null; ls -A /aenv/link; true") == ""
    numbers = (await box.out("echo /proc/[0-9]*")).split()
    assert numbers[0] == "/proc/1"
    assert len(numbers) <= 2
    assert await box.out("cat /proc/1/cmdline | tr '\\0' ' '") == "aenv-agent fd:3 "
    who = "id -u; for name in net pid mnt ipc uts; do readlink /proc/self/ns/$name; done; ls /task"
    main = await jail.exec("one", ["sh", "-c", who])
    assert not set(main.stdout.split()) & set((await box.out(who)).split())


async def test_it_cannot_reach_the_agent(box):
    done = await box.run("kill -9 1; kill -9 -1; true")
    assert done["code"] in (0, -signal.SIGKILL)
    look = "cat /proc/1/environ || ls /proc/1/fd || readlink /proc/1/exe || readlink /proc/1/root"
    assert (await box.run(look))["code"] != 0
    assert await box.out("echo on") == "on\n"


async def test_the_main_sandbox_cannot_take_the_place_of_the_agent(jail, box):
    done = await jail.exec("one", ["sh", "-c", "rm /aenv/link/second.sock || mv /aenv/link/second.sock /tmp"])
    assert done.returncode != 0
    assert "Read-only" in done.stderr
    assert await box.out("echo on") == "on\n"


async def test_a_root_file_system_is_the_root(jail, duals):
    root = duals.root_file_system()
    before = sorted(str(path) for path in root.rglob("*"))
    box = await duals.start(jail, "one", root)
    assert await box.out("cat /etc/issue; pwd; echo $HOME") == "another system\n/\n/root\n"
    await box.out("echo changed > /etc/issue; rm /bin/touch; mkdir /new; echo x > /testbed/x; echo x > /root/x")
    assert await box.out("cat /etc/issue; ls /usr/bin /project 2>/dev/null; ls -d /new") == "changed\n/new\n"
    assert await box.out("ls /proc/1 >/dev/null && echo x > /dev/null && echo x > /shared/x && ls /shared") == "x\n"
    assert "42" in await box.call("typed", line="echo $((6*7))")
    await box.call("own", path="/shared/x", text="y")
    assert sorted(str(path) for path in root.rglob("*")) == before
    assert (root / "etc" / "issue").read_text() == "another system\n"


async def test_a_root_file_system_with_links_where_directories_must_be_is_refused(jail, duals):
    root = duals.root_file_system()
    (root / "dev").symlink_to("/usr")
    with pytest.raises(StartFailed, match="second sandbox did not start: /dev of the task's root .* is a link"):
        await duals.start(jail, "one", root)
    (root / "dev").unlink()
    (root / "etc" / "hosts").symlink_to("/etc/passwd")
    box = await duals.start(jail, "two", root)
    assert "localhost" in await box.out("cat /etc/hosts")


async def test_a_directory_with_links_to_this_machine_is_no_root_file_system(jail, duals):
    task = duals.task()
    (task / "usr").symlink_to("/usr")
    box = await duals.start(jail, "one", task)
    assert await box.out("pwd; ls -d usr/bin") == "/task\nusr/bin\n"


async def test_files_of_other_owners_stay_theirs(jail, duals):
    task = duals.task()
    for name, owner in (("daemon.txt", 1), ("user.txt", 4321), ("far.txt", 123456)):
        (task / name).write_text("theirs\n")
        os.chown(task / name, owner, owner)
    os.chown(task, 77777, 77777)
    os.chown(task / "file.txt", 77777, 77777)
    box = await duals.start(jail, "one", task)
    own, *others = (await box.out("stat -c %u file.txt daemon.txt user.txt far.txt private.txt")).split()
    assert own == (await box.out("id -u")).strip()
    assert others == ["1", "4321", "65534", "0"]
    assert (await box.run("cat private.txt"))["code"] != 0
    await box.out("echo mine > file.txt; cat user.txt; mv user.txt moved.txt")
    assert (await box.run("echo mine > far.txt || echo mine > daemon.txt"))["code"] != 0


async def test_many_at_once(jail, duals, pen):
    task = duals.task()
    boxes = await asyncio.gather(*(duals.start(jail, f"n{number}", task) for number in range(6)))
    said = await asyncio.gather(*(box.out(f"echo {number} > x; cat x") for number, box in enumerate(boxes)))
    assert [text.strip() for text in said] == [str(number) for number in range(6)]
    await asyncio.gather(*(jail.delete(f"n{number}") for number in range(6)))
    assert not dual.agents(pen.processes()) + dual.stubs(pen.processes())


async def test_files_whose_owner_cannot_be_changed_are_copied(jail, duals, tmp_path, leftovers):
    """An overlay is a file system that cannot show its files as another's."""
    lower = duals.task()
    (lower / "link").symlink_to("/etc/hostname")
    os.mkfifo(lower / "pipe")
    mounted = tmp_path / "mounted"
    for name in ("mounted", "upper", "work"):
        (tmp_path / name).mkdir()
    options = f"lowerdir={lower},upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(mounted)], check=True)
    try:
        box = await duals.start(jail, "one", mounted)
        assert await box.out("cat file.txt private.txt; ls") == "original\nmine\nfile.txt\nlink\nprivate.txt\n"
        await box.out("echo changed > file.txt; rm private.txt")
        assert (mounted / "file.txt").read_text() == "original\n"
        (mounted / "large").write_bytes(os.urandom(24 * 1024**2))
        small = {"memory": "64Mi", "ephemeralStorage": "32Mi"}
        with pytest.raises(
            StartFailed, match="(?s)second sandbox did not start: .*large cannot be copied: .*No space left"
        ):
            await duals.start(jail, "two", mounted, resources=small)
        await jail.delete("one")
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=True)


# Network and limits


async def test_its_network_is_the_instances(jail, duals):
    with dual.web_server() as port:
        ask = f"python3 -c \"import socket; socket.create_connection(('127.0.0.1', {port}), 5)\""
        if shutil.which("python3", path="/usr/bin:/bin:/usr/local/bin") is None:
            pytest.skip("needs python3 below /usr")
        task = duals.task()
        none = await duals.start(jail, "none", task)
        assert (await none.run(ask))["code"] != 0
        full = await duals.start(jail, "full", task, network="full")
        assert (await full.run(ask))["code"] == 0
        listed = await duals.start(jail, "list", task, network={"allow": [f"127.0.0.1:{port}"]})
        assert (await listed.run(ask))["code"] != 0
        by_proxy = (
            "import urllib.request as u; p = u.ProxyHandler({'http': 'http://127.0.0.1:3128'}); "
            "print(u.build_opener(p).open('http://127.0.0.1:PORT/', timeout=20).read())"
        )
        assert "hello" in await listed.out(f'python3 -c "{by_proxy.replace("PORT", str(port))}"')
        done = await listed.run(f'python3 -c "{by_proxy.replace("PORT", str(port + 1))}"')
        assert "403" in done["err"]


async def test_what_it_writes_is_limited_and_a_full_disk_is_told(jail, duals):
    box = await duals.start(jail, "one", duals.task(), resources={"memory": "128Mi", "ephemeralStorage": "32Mi"})
    for place in ("/task", "/shared", "/tmp"):
        done = await box.run(f"dd if=/dev/zero of={place}/large bs=1M count=64 2>&1; rm {place}/large")
        assert "No space left" in done["out"]
    assert await box.out("echo on") == "on\n"


async def test_processes_without_end_leave_the_main_sandbox_its_own(jail, duals):
    box = await duals.start(jail, "one", duals.task())
    bomb = "i=0; while [ $i -lt 400 ]; do sleep 1000 & i=$((i+1)); done; echo all"
    done = await box.run(bomb)
    assert "all" not in done["out"]
    assert (await jail.exec("one", ["echo", "on"])).stdout == "on\n"
    await jail.delete("one")


async def test_one_limit_of_memory_is_for_both(jail, duals, family):
    if shutil.which("python3", path="/usr/bin:/bin") is None:
        pytest.skip("needs python3 below /usr")
    box = await duals.start(jail, "one", duals.task(), resources={"memory": "128Mi"})
    try:
        done = await box.run("python3 -c 'x = bytearray(400 << 20)'")
        assert done["code"] in (-signal.SIGKILL, 128 + signal.SIGKILL)
    except AEnvError:
        assert "out of memory" in (await over(jail, "one")).reason


async def test_what_it_uses_counts(jail, duals):
    box = await duals.start(jail, "one", duals.task())
    before = (await jail.used("one")).cpu
    await box.out("i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done")
    assert (await jail.used("one")).cpu > before


# Who can have one


async def test_what_cannot_be_is_refused(jail, duals, home, monkeypatch):
    spec = duals.spec(duals.task())
    replace = msgspec.structs.replace
    with pytest.raises(Unsupported, match="second container") as caught:
        await jail.create("one", replace(spec, second=Second(image="ubuntu")))
    assert "docker" in (caught.value.hint or "")
    with pytest.raises(Invalid, match="is not there"):
        await jail.create("one", replace(spec, second=Second(directory="/nowhere")))
    for place in ("/shared", "/shared/x", "/aenv/link"):
        volume = Volume(owner="me", name="data", mount=place, size=2**24)
        with pytest.raises(Invalid, match="which the second sandbox needs"):
            await jail.create("one", replace(spec, volumes=[volume]))
    if not (Path(agent.__file__).parent / "bin").exists():
        shutil.rmtree(home / "cache")
        monkeypatch.setenv("PATH", "/nowhere")
        with pytest.raises(Unsupported, match="no agent for the second container") as caught:
            await jail.create("one", spec)
        assert "gcc" in (caught.value.hint or "")
    assert await jail.find() == []


async def test_without_isolation_there_is_none(duals, leftovers):
    async with ProcessEngine(isolation="none") as engine:
        with pytest.raises(Unsupported, match="without isolation"):
            await duals.start(engine, "one", duals.task())


async def test_strict_isolation_has_it_all(duals, leftovers):
    async with ProcessEngine(isolation="strict") as engine:
        box = await duals.start(engine, "one", duals.task(), network=None)
        assert await box.out("ls") == "file.txt\nprivate.txt\n"


async def test_a_volume_beside_it(jail, duals):
    if why := loops.missing():
        pytest.skip(f"needs volumes: {why}")
    volume = Volume(owner="me", name="data", mount="/data", size=2**24)
    box = await duals.start(jail, "one", duals.task(), volumes=[volume])
    assert await box.call("own", path="/data/x", text="kept") == "kept"
    assert await box.out("ls /data 2>/dev/null; ls /shared; echo on") == "on\n"


async def test_from_a_program(duals, leftovers, monkeypatch):
    task = duals.task()
    monkeypatch.chdir(duals.project)
    async with Environment("dual", datasource=str(task), provision=Embedded()) as env:
        done = await env.call_tool("run", {"command": "cat file.txt"})
        assert done.structured["out"] == "original\n"


async def test_it_lives_on_when_the_engine_restarts(duals, leftovers):
    first = ProcessEngine(state="lasting")
    try:
        box = await duals.start(first, "one", duals.task())
        await box.out("echo kept > new.txt")
        await first.close()
        async with ProcessEngine(state="lasting") as again:
            found = await again.get("one")
            assert await dual.Box(found).out("cat new.txt") == "kept\n"
            await again.end()
    finally:
        await first.end()


# Its end


@pytest.mark.parametrize("who", ["agent", "stub"])
async def test_when_it_dies_the_sandbox_has_failed(jail, duals, pen, leftovers, who):
    other = await duals.start(jail, "other", duals.task())
    mine = {process.pid for process in pen.processes()}
    await duals.start(jail, "one", duals.task("two"))
    new = [process for process in pen.processes() if process.pid not in mine]
    (dual.agents(new) if who == "agent" else dual.stubs(new))[0].kill()
    found = await over(jail, "one")
    assert found.state is State.FAILED
    assert "its second sandbox ended" in found.reason
    with pytest.raises(Conflict, match="second sandbox ended"):
        await duals.start(jail, "one", duals.task("three"))
    assert await other.out("echo on") == "on\n"
    await eventually("one agent", lambda: len(dual.agents(pen.processes())) == 1)


@pytest.mark.parametrize("role", ["instance", "first", "zygote", "stub"])
async def test_it_ends_with_its_instance(jail, duals, family, pen, role):
    box = await duals.start(jail, "one", duals.task())
    await box.out("sleep 1000 >/dev/null 2>&1 & setsid sleep 1000 >/dev/null 2>&1 & true")
    if role == "stub":
        (found,) = [stub for stub in family.stubs() if "process.second" not in stub.command]
    else:
        found = family.get(role)
    found.kill()
    assert (await over(jail, "one")).state is State.FAILED
    await eventually("the end of the second", lambda: not dual.agents(pen.processes()) + dual.stubs(pen.processes()))
    await duals.start(jail, "two", duals.task("again"))


async def test_a_teardown_still_has_it(jail, duals):
    module = duals.project / "src" / "custom_env.py"
    ends = (
        "\n\n@register_teardown\nasync def clear(ctx: Context) -> None:\n"
        "    os._exit((await ctx.second.exec('exit 42')).returncode)\n"
    )
    module.write_text(module.read_text() + ends)
    await duals.start(jail, "one", duals.task(), idle=0.2)
    assert "exit code 42" in (await over(jail, "one")).reason


async def test_when_it_is_deleted_nothing_is_left(jail, duals, pen, leftovers):
    box = await duals.start(jail, "one", duals.task())
    await box.out("sleep 1000 >/dev/null 2>&1 & setsid sleep 1000 >/dev/null 2>&1 & true")
    await jail.delete("one")
    assert not dual.agents(pen.processes()) + dual.stubs(pen.processes())
    assert not [path for path in leftovers.found("files").get("files", ()) if "-second" in path]


async def test_a_killed_spawner_takes_it_along(jail, duals, family, pen):
    await duals.start(jail, "one", duals.task())
    family.spawner.kill()
    await lab.noticed(jail)
    await eventually("the end of the second", lambda: not dual.agents(pen.processes()) + dual.stubs(pen.processes()))
    await duals.start(jail, "two", duals.task("again"))


SCRIPT = """
import asyncio, sys
from pathlib import Path
from aenv.engines.process.engine import ProcessEngine
from aenv.models import Second
from tests.engines.process import lab
async def main():
    engine = ProcessEngine()
    spec = lab.spec(Path(sys.argv[1]), second=Second(directory=sys.argv[2]), network="none")
    sandbox = await engine.create("one", spec)
    await lab.call(sandbox, "run", command="sleep 1000 >/dev/null 2>&1 & true")
    print("up", flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


async def test_a_killed_program_takes_it_along(duals, home, pen, leftovers):
    with lab.owner(SCRIPT, home, str(duals.project), str(duals.task()), cwd=lab.ROOT) as process:
        assert await lab.line(process) == "up"
        assert dual.agents(pen.processes())
        process.kill()
        await leftovers.none("processes", "control groups", "mounts", "files")


@pytest.mark.parametrize("how", ["cancelled", "deleted", "spawner killed", "jail killed"])
async def test_at_whatever_moment_a_start_ends_nothing_is_left(jail, duals, family, pen, leftovers, how):
    task = duals.task()
    anew = how == "spawner killed"
    took = await _time(duals.start(jail, "first", task))
    if not anew:
        took = await _time(duals.start(jail, "timed", task))
        await jail.delete("timed")
    drawn = random.Random(7)
    for number in range(8):
        await jail.find()  # so that there is a spawner
        moment = drawn.uniform(0, took)
        creating = asyncio.create_task(jail.create(f"n{number}", duals.spec(task)))
        known = {process.pid for process in pen.processes()}
        await asyncio.sleep(moment)
        if how == "cancelled":
            creating.cancel()
        elif how == "deleted":
            await jail.delete(f"n{number}")
        elif anew:
            family.spawner.kill()
        else:
            for process in dual.stubs(pen.processes()):
                if process.pid not in known:
                    process.kill()
        await asyncio.wait((creating,))
        if not creating.cancelled():
            assert creating.exception() is None or isinstance(creating.exception(), AEnvError)
        if anew:
            await lab.noticed(jail)
        else:
            await jail.delete(f"n{number}")
    if anew:
        await leftovers.none("processes", "mounts")
        await duals.start(jail, "next", task)  # which removes what the dead ones could not
    else:
        assert len(dual.agents(pen.processes())) == 1
        assert len(dual.stubs(pen.processes())) == 1


async def _time(work):
    loop = asyncio.get_running_loop()
    began = loop.time()
    await work
    return loop.time() - began
