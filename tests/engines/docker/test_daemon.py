"""The Engine API, asked of a real Docker and a real Podman, and of servers that are neither."""

import asyncio
import contextlib
import io
import json
import tarfile
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.engines.docker import daemon as daemons
from aenv.engines.docker.daemon import Daemon, Demultiplexer, demultiplex, failure
from aenv.errors import (
    AEnvError,
    Conflict,
    Invalid,
    InvalidConfig,
    NetworkError,
    NotFound,
    SandboxError,
    StorageFull,
    TooLarge,
    Unsupported,
)

PATIENCE = 120.0
LABEL = {"aenv.test": "daemon"}


@pytest.fixture
async def asked(daemon):
    return await Daemon.find(daemon)


@contextlib.asynccontextmanager
async def container(asked, image, *command, **options):
    """A container of that image, which is gone when the block ends."""
    body = {
        "Image": image,
        "Entrypoint": list(command),
        "Cmd": [],
        "Labels": LABEL,
        "HostConfig": {"NetworkMode": "none"},
        **options,
    }
    made = await asked.ask("POST", "/containers/create", query={"name": f"aenv-test-{uuid.uuid4().hex}"}, body=body)
    try:
        yield made["Id"]
    finally:
        await asked.ask("DELETE", f"/containers/{made['Id']}", query={"force": True, "v": True})


async def test_a_daemon_says_what_it_is(asked, daemon):
    about = await asked.about()
    assert about.name == ("podman" if "podman" in daemon else "docker")
    assert about.os == "linux"
    assert about.architecture in ("amd64", "arm64")
    assert about.root.startswith("/")
    assert about.runtimes
    assert about.log_drivers & {"json-file", "k8s-file"}
    assert await asked.about() is about
    assert tuple(map(int, about.api.split("."))) <= daemons.NEWEST


async def test_errors_of_the_daemon_are_ours(asked, base_image):
    with pytest.raises(NotFound, match="nonesuch"):
        await asked.ask("GET", "/containers/nonesuch/json")
    with pytest.raises(NotFound):
        async with asked.hijack("/exec/nonesuch/start", body={}):
            pass
    with pytest.raises(NotFound):
        await asked.put("/containers/nonesuch/archive", query={"path": "/"}, content=b"")
    with pytest.raises(NotFound):
        async for _ in asked.lines("GET", "/containers/nonesuch/stats"):
            pass
    with pytest.raises((Invalid, SandboxError)):
        await asked.ask("POST", "/containers/create", body={"Image": base_image, "HostConfig": {"Memory": "much"}})
    async with container(asked, base_image, "sleep", "600") as id:
        name = (await asked.ask("GET", f"/containers/{id}/json"))["Name"].strip("/")
        with pytest.raises((Conflict, SandboxError), match="in use"):
            await asked.ask("POST", "/containers/create", query={"name": name}, body={"Image": base_image})


async def test_what_is_so_already_is_no_error(asked, base_image):
    async with container(asked, base_image, "sleep", "600") as id:
        for _ in range(2):
            assert await asked.ask("POST", f"/containers/{id}/start") is None


async def test_filters_are_sent_as_json(asked, base_image):
    async with container(asked, base_image, "sleep", "600", Labels={**LABEL, "mine": (mark := uuid.uuid4().hex)}) as id:
        query = {"all": True, "filters": {"label": [f"mine={mark}"]}, "limit": None}
        assert [found["Id"] for found in await asked.ask("GET", "/containers/json", query=query)] == [id]
        query["filters"] = {"label": ["mine=another"]}
        assert await asked.ask("GET", "/containers/json", query=query) == []


async def test_an_exec_has_an_input_two_outputs_and_an_exit_code(asked, base_image):
    sent = b"0123456789abcdef" * 20_000
    async with container(asked, base_image, "sleep", "600") as id:
        await asked.ask("POST", f"/containers/{id}/start")
        command = ["sh", "-c", "cat; echo wrong >&2; exit 7"]
        body = {"AttachStdin": True, "AttachStdout": True, "AttachStderr": True, "Cmd": command}
        exec = (await asked.ask("POST", f"/containers/{id}/exec", body=body))["Id"]
        got = {1: b"", 2: b""}
        async with asyncio.timeout(PATIENCE):
            start = {"Detach": False, "Tty": False}
            async with asked.hijack(f"/exec/{exec}/start", body=start) as connection:
                reading = asyncio.create_task(_collect(connection.output(), got))
                for part in range(0, len(sent), 50_000):
                    await connection.send(sent[part : part + 50_000])
                connection.end_input()
                await reading
        assert got == {1: sent, 2: b"wrong\n"}
        assert (await asked.ask("GET", f"/exec/{exec}/json"))["ExitCode"] == 7


async def _collect(output, got):
    async for channel, piece in output:
        got[channel] += piece


async def test_what_runs_sees_its_input_end_with_the_connection(asked, base_image):
    streams = {"OpenStdin": True, "StdinOnce": True, "AttachStdin": True, "AttachStdout": True}
    async with container(asked, base_image, "cat", **streams) as id, asyncio.timeout(PATIENCE):
        await asked.ask("POST", f"/containers/{id}/start")
        query = {"stream": True, "stdin": True, "stdout": True, "stderr": True}
        async with asked.hijack(f"/containers/{id}/attach", query=query) as connection:
            await connection.send(b"hello\n")
            got = b""
            async with contextlib.aclosing(connection.output()) as output:
                async for _, piece in output:
                    got += piece
                    if got == b"hello\n":
                        break
        ended = await asked.ask("POST", f"/containers/{id}/wait", timeout=PATIENCE)
        assert ended["StatusCode"] == 0
        logs = await asked.fetch(f"/containers/{id}/logs", query={"stdout": True, "stderr": True}, most=1_000_000)
        assert b"".join(piece for _, piece in demultiplex(logs)) == b"hello\n"


async def test_an_error_of_the_caller_stays_what_it_is(asked, base_image):
    async with container(asked, base_image, "sleep", "600") as id:
        await asked.ask("POST", f"/containers/{id}/start")
        with pytest.raises(ValueError, match="mine"):
            async with asked.hijack(f"/containers/{id}/attach", query={"stream": True, "stdout": True}):
                raise ValueError("mine")


async def test_archives_go_in_and_out_and_are_bounded(asked, base_image):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        info = tarfile.TarInfo("note.txt")
        info.size = 100_000
        archive.addfile(info, io.BytesIO(b"n" * info.size))
    async with container(asked, base_image, "sleep", "600") as id:
        where = f"/containers/{id}/archive"
        await asked.put(where, query={"path": "/tmp"}, content=buffer.getvalue())
        got = await asked.fetch(where, query={"path": "/tmp/note.txt"}, most=1_000_000)
        with tarfile.open(fileobj=io.BytesIO(got)) as archive:
            assert archive.extractfile("note.txt").read() == b"n" * 100_000
        with pytest.raises(TooLarge):
            await asked.fetch(where, query={"path": "/tmp/note.txt"}, most=10_000)


async def test_events_come_as_they_happen(asked, base_image):
    mark = uuid.uuid4().hex
    heard: asyncio.Queue[str] = asyncio.Queue()

    async def listen():
        query = {"filters": {"label": [f"mine={mark}"], "type": ["container"]}, "since": "1"}
        async for event in asked.lines("GET", "/events", query=query):
            heard.put_nowait(str(event.get("Action") or event.get("status")))

    listening = asyncio.create_task(listen())
    try:
        async with container(asked, base_image, "true", Labels={**LABEL, "mine": mark}) as id:
            await asked.ask("POST", f"/containers/{id}/start")
            async with asyncio.timeout(PATIENCE):
                while await heard.get() != "die":
                    pass
    finally:
        listening.cancel()
        await asyncio.wait((listening,))


# Where it is


@pytest.mark.parametrize(
    ("address", "base"),
    [
        ("unix:///run/x.sock", "unix:/run/x.sock"),
        ("unix:/run/x.sock", "unix:/run/x.sock"),
        ("/run/x.sock", "unix:/run/x.sock"),
        ("tcp://127.0.0.1:2375", "http://127.0.0.1:2375"),
        ("tcp://docker", "http://docker:2375"),
        ("tcp://[::1]:2375", "http://[::1]:2375"),
        ("http://docker:80/", "http://docker:80"),
        ("https://docker", "https://docker:443"),
    ],
)
def test_addresses_are_written_in_many_ways(address, base):
    assert Daemon(address).base == base


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("ssh://ada@host", "ssh"),
        ("unix://run/x.sock", "begins with /"),
        ("unix:", "begins with /"),
        ("fd://", "not the address"),
        ("npipe:////./pipe/docker", "not the address"),
        ("docker", "not the address"),
        ("tcp://", "not the address"),
        ("tcp://host:port", "not the address"),
        ("tcp://ada:secret@host:1", "not the address"),
        ("tcp://a b:1", "not the address"),
        ("unix:///a\nb", "not the address"),
    ],
)
def test_an_address_that_is_none_is_refused(address, said):
    with pytest.raises(InvalidConfig, match=said) as caught:
        Daemon(address)
    assert caught.value.hint


async def test_the_settings_say_where_it_is(daemon, monkeypatch, tmp_path):
    monkeypatch.setenv("AENV_HOME", str(tmp_path))
    monkeypatch.delenv("AENV_DOCKER_HOST", raising=False)
    monkeypatch.setenv("DOCKER_HOST", daemon)
    assert (await Daemon.find()).base == Daemon(daemon).base
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    monkeypatch.setenv("AENV_DOCKER_HOST", daemon)
    assert (await Daemon.find()).base == Daemon(daemon).base
    with pytest.raises(NetworkError, match="nobody.sock"):
        await Daemon.find(f"unix://{tmp_path}/nobody.sock")


async def test_where_nobody_answers_all_that_was_tried_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("AENV_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("AENV_DOCKER_HOST", "DOCKER_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(daemons, "SOCKETS", (f"{tmp_path}/a.sock", f"{tmp_path}/b.sock"))
    with pytest.raises(NetworkError, match="neither Docker nor Podman") as caught:
        await Daemon.find()
    for name in ("a.sock", "b.sock", "docker.sock", "podman.sock"):
        assert f"{tmp_path}/{name}" in caught.value.message or f"{tmp_path}/podman/{name}" in caught.value.message
    assert caught.value.hint == "start Docker or Podman, or set AENV_DOCKER_HOST"


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:1", f"tcp://{'a' * 100}.example:1", f"unix:///{'x' * 200}"])
async def test_an_address_where_nobody_can_be(address):
    with pytest.raises(NetworkError) as caught:
        await Daemon.find(address)
    assert caught.value.hint


# Servers that are neither


@contextlib.asynccontextmanager
async def server(folder, *answers):
    """Somebody who gives one of these answers to each request, the last one for ever; None is silence."""
    left, over = list(answers), asyncio.Event()
    tasks = set()

    async def serve(reader, writer):
        tasks.add(asyncio.current_task())
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    await reader.readexactly(int(line.partition(b":")[2]))
            said = left.pop(0) if len(left) > 1 else left[0]
            if said is None:
                await over.wait()
            else:
                writer.write(said)
                await writer.drain()
        writer.close()

    listening = await asyncio.start_unix_server(serve, folder / "d.sock")
    try:
        yield f"unix://{folder}/d.sock"
    finally:
        over.set()
        listening.close()
        await asyncio.gather(*tasks)


def answer(body: bytes, status: int = 200, *head: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", "Connection: close", f"Content-Length: {len(body)}", *head]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


PING = answer(b"OK", 200, "Api-Version: 1.41")


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n",
        answer(b"<html>welcome</html>"),
        answer(b"OK", 200, "Api-Version: newest"),
        answer(b"no", 500, "Api-Version: 1.41"),
        answer(b"no", 302, "Location: http://elsewhere"),
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nOK",
    ],
)
async def test_who_is_no_daemon_is_told(tmp_path, said):
    async with server(tmp_path, said) as address:
        with pytest.raises(NetworkError) as caught:
            await Daemon.find(address)
    assert caught.value.hint == daemons.HINT


async def test_a_daemon_that_hangs_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(daemons, "GREETING", 0.2)
    async with server(tmp_path, None) as address, asyncio.timeout(PATIENCE):
        with pytest.raises(NetworkError, match="did not answer within 0.2 s"):
            await Daemon.find(address)
    (tmp_path / "d.sock").unlink()
    monkeypatch.undo()
    async with server(tmp_path, PING, None) as address, asyncio.timeout(PATIENCE):
        asked = await Daemon.find(address)
        with pytest.raises(NetworkError, match="did not answer within 0.1 s"):
            await asked.ask("POST", "/containers/x/start", timeout=0.1)
        with pytest.raises(NetworkError, match="silent"):
            async for _ in asked.lines("GET", "/events", patience=0.1):
                pass
        monkeypatch.setattr(daemons, "FIRST_WORD", 0.2)
        with pytest.raises(NetworkError, match="does not answer"):
            async for _ in asked.lines("GET", "/events"):
                pass


async def test_an_old_daemon_is_told_so(tmp_path):
    async with server(tmp_path, answer(b"OK", 200, "Api-Version: 1.12")) as address:
        with pytest.raises(Unsupported, match="too old"):
            await Daemon.find(address)


@pytest.mark.parametrize(
    ("version", "spoken"),
    [(b'{"MinAPIVersion": "1.24"}', "1.41"), (b'{"MinAPIVersion": "1.44"}', "1.44"), (b"{}", "1.41"), (b"[]", "1.41")],
)
async def test_a_newer_daemon_is_asked_in_a_version_that_both_know(tmp_path, version, spoken):
    newer = answer(b"OK", 200, "Api-Version: 1.52")
    async with server(tmp_path, newer, answer(version), answer(b"{}")) as address:
        asked = await Daemon.find(address)
        assert (await asked.about()).api == spoken


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (answer(b"{"), NetworkError),
        (answer(b"[" * 100_000), NetworkError),
        (answer(b"\xff\xfe\x00"), NetworkError),
        (answer(b"<html>", 500), SandboxError),
        (answer(b'{"message": ["odd"]}', 500), SandboxError),
        (answer(b'{"message": "write /x: no space left on device"}', 500), StorageFull),
        (answer(b'{"message": "x"}', 418), SandboxError),
        (answer(b"", 404), NotFound),
    ],
)
async def test_nonsense_is_an_error_of_ours(tmp_path, said, kind):
    async with server(tmp_path, PING, said) as address:
        asked = await Daemon.find(address)
        with pytest.raises(kind) as caught:
            await asked.ask("GET", "/containers/json")
        assert isinstance(caught.value, AEnvError)
        assert caught.value.message


@pytest.mark.parametrize(
    "said", [b"[]", b"7", b'{"Plugins": 7}', b'{"Components": [7]}', b'{"Runtimes": 7, "Components": 7}']
)
async def test_a_daemon_that_cannot_say_what_it_is(tmp_path, said):
    async with server(tmp_path, PING, answer(said)) as address:
        asked = await Daemon.find(address)
        with pytest.raises(NetworkError, match="understood"):
            await asked.about()


@pytest.mark.parametrize("body", [b'{"a": 1}\nnonsense\n', b"x" * 5000, b'{"a": 1}\n{"b": '])
async def test_a_stream_of_nonsense(tmp_path, monkeypatch, body):
    monkeypatch.setattr(daemons, "MOST_LINE", 1000)
    async with server(tmp_path, PING, answer(body)) as address:
        asked = await Daemon.find(address)
        with pytest.raises(NetworkError):
            async for _ in asked.lines("GET", "/events"):
                pass


async def test_objects_of_a_stream_need_no_lines(tmp_path):
    body = b'{"a": 1}{"a": 2}\r\n\n  {"a": 3} [4] {"a": 5}'
    async with server(tmp_path, PING, answer(body)) as address:
        asked = await Daemon.find(address)
        assert [found["a"] async for found in asked.lines("GET", "/events")] == [1, 2, 3, 5]


def test_failures_are_found_in_a_stream():
    assert failure({"status": "Pulling"}) == ""
    assert failure({"error": "short", "errorDetail": {"message": "long"}}) == "long"
    assert failure({"error": "short", "errorDetail": "odd"}) == "short"


# Frames


@given(st.lists(st.tuples(st.sampled_from([0, 1, 2, 3]), st.binary(max_size=40)), max_size=8), st.data())
def test_frames_are_taken_apart_wherever_they_are_cut(frames, data):
    raw = b"".join(bytes([channel, 0, 0, 0]) + len(piece).to_bytes(4, "big") + piece for channel, piece in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    got = {1: b"", 2: b""}
    demultiplexer = Demultiplexer()
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        for channel, piece in demultiplexer.feed(raw[start:end]):
            got[channel] += piece
    assert got == {
        1: b"".join(piece for channel, piece in frames if channel < 2),
        2: b"".join(piece for channel, piece in frames if channel >= 2),
    }


@pytest.mark.parametrize("raw", [b"plain text that is no frame", b"\x01\x01\x00\x00\x00\x00\x00\x01x", b"\x09" * 20])
def test_what_is_no_frame_is_told(raw):
    with pytest.raises(NetworkError, match="frames"):
        demultiplex(raw)


def test_an_error_is_told_with_its_cause():
    body = json.dumps({"message": "cannot", "cause": "because"}).encode()
    assert daemons._message(body) == "cannot: because"
