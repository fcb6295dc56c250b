"""Packages by their sha256: what every place promises, and what only a folder or a bucket can do."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from aenv.errors import Invalid, InvalidConfig, NetworkError, NotFound, StorageFull, TooLarge
from aenv.store import blobs as folders
from aenv.store import bucket as buckets
from aenv.store.blobs import Blobs, Damaged, FileBlobs, open_blobs
from aenv.store.bucket import BucketBlobs, Keys, authorize
from tests.store.seaweed import KEYS, Bucket, seaweed
from tests.store.servers import free_port

MOST = 10_000_000


async def chunks(*data: bytes) -> AsyncIterator[bytes]:
    for piece in data:
        yield piece


async def put(blobs: Blobs, data: bytes) -> str:
    digest, size = await blobs.put(chunks(data[:3], b"", data[3:]), most=MOST)
    assert (digest, size) == (hashlib.sha256(data).hexdigest(), len(data))
    return digest


async def content(blobs: Blobs, digest: str) -> bytes:
    return b"".join([piece async for piece in blobs.open(digest)])


async def digests(blobs: Blobs) -> set[str]:
    return {blob.digest async for blob in blobs.all()}


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with seaweed(tmp_path_factory.mktemp("seaweed")) as found:
        yield found


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[FileBlobs]:
    async with await open_blobs(f"file:{tmp_path / 'blobs'}") as opened:
        assert isinstance(opened, FileBlobs)
        yield opened


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty place."""
    if request.param == "file":
        return f"file:{request.getfixturevalue('tmp_path') / 'blobs'}"
    monkeypatch.setenv("AENV_S3_ACCESS_KEY", KEYS.access)
    monkeypatch.setenv("AENV_S3_SECRET_KEY", KEYS.secret)
    server: Bucket = request.getfixturevalue("s3")
    return server.url(f"a place/{request.node.name}")


@pytest.fixture
async def blobs(url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Blobs]:
    """What is there, given in small pieces."""
    monkeypatch.setattr(folders, "PIECE", 1000)
    monkeypatch.setattr(buckets, "PIECE", 1000)
    async with await open_blobs(url) as opened:
        yield opened


# What every place promises


@pytest.mark.parametrize("size", [0, 1, 1000, 2500])
async def test_what_was_put_is_what_is_read(blobs: Blobs, size: int) -> None:
    data = os.urandom(size)
    before = time.time()
    digest = await put(blobs, data)
    assert await content(blobs, digest) == data
    assert await blobs.exists(digest)
    [found] = [blob async for blob in blobs.all()]
    assert (found.digest, found.size) == (digest, size)
    assert abs(found.modified - before) < 60


async def test_there_is_none_that_nobody_put(blobs: Blobs) -> None:
    digest = "0" * 64
    assert not await blobs.exists(digest)
    assert await digests(blobs) == set()
    with pytest.raises(NotFound, match=digest):
        await content(blobs, digest)
    assert await blobs.delete(digest)


@pytest.mark.parametrize("digest", ["", "abc", "0" * 63 + "G", "../" + "0" * 61, "A" * 64, "0" * 65])
async def test_what_is_no_digest_is_refused(blobs: Blobs, digest: str) -> None:
    for asked in (blobs.exists(digest), blobs.delete(digest), content(blobs, digest)):
        with pytest.raises(Invalid, match="sha256"):
            await asked


async def test_one_too_large_leaves_nothing(blobs: Blobs) -> None:
    assert (await blobs.put(chunks(b"12", b"34"), most=4))[1] == 4
    with pytest.raises(TooLarge, match="4 bytes"):
        await blobs.put(chunks(b"12", b"345"), most=4)
    assert await digests(blobs) == {hashlib.sha256(b"1234").hexdigest()}


async def test_one_that_breaks_off_leaves_nothing(blobs: Blobs) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"beginning"
        raise NetworkError("the client left")

    with pytest.raises(NetworkError, match="the client left"):
        await blobs.put(broken(), most=MOST)

    begun = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield b"beginning"
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(blobs.put(endless(), most=MOST))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await digests(blobs) == set()


async def test_the_same_is_kept_once_whoever_puts_it(blobs: Blobs) -> None:
    found = await asyncio.gather(*(put(blobs, b"same") for _ in range(5)), put(blobs, b"other"))
    assert await digests(blobs) == set(found)
    assert len(set(found)) == 2
    assert await content(blobs, found[0]) == b"same"


async def test_what_was_put_lately_is_not_removed_with_the_old(blobs: Blobs) -> None:
    digest = await put(blobs, b"new")
    assert not await blobs.delete(digest, before=time.time() - 60)
    assert await content(blobs, digest) == b"new"
    assert await blobs.delete(digest, before=time.time() + 60)
    assert not await blobs.exists(digest)
    assert await blobs.delete(digest)


async def test_what_is_damaged_is_never_given_as_a_whole(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = await put(blobs, b"1" * 2500)
    if isinstance(blobs, FileBlobs):
        blobs._path(digest).write_bytes(b"2" * 2500)
    else:
        assert isinstance(blobs, BucketBlobs)
        key = blobs._key(digest)
        with monkeypatch.context() as patch:
            patch.setattr(blobs, "_key", lambda _: key)
            await put(blobs, b"2" * 2500)
    given: list[bytes] = []

    async def read() -> None:
        async for piece in blobs.open(digest):
            given.append(piece)  # noqa: PERF401  what comes before the failure counts

    with pytest.raises(Damaged, match=digest):
        await read()
    assert sum(map(len, given)) < 2500
    assert await put(blobs, b"1" * 2500) == digest  # it is mended by putting it again
    assert await content(blobs, digest) == b"1" * 2500


async def test_all_of_many(blobs: Blobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "_LISTED_AT_ONCE", 3)
    made = {await put(blobs, b"%d" % number) for number in range(8)}
    assert await digests(blobs) == made


# Addresses


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "does not say"),
        ("packages", "does not say"),
        ("ftp://host/x", "'ftp'"),
        ("file:", "names no folder"),
        ("file:a\0b", "names no folder"),
        ("s3://", "none of a bucket"),
        ("s3://UPPER/x", "none of a bucket"),
        ("s3://bucket/x?colour=blue", "none of a bucket"),
        ("s3://bucket/x?endpoint", "none of a bucket"),
        ("s3://bucket/x?endpoint=nowhere", "'nowhere' is not an address"),
        ("s3://key:hidden@bucket/x", "does not belong"),
        ("s3://bucket/x?endpoint=http://127.0.0.1:1", "no key"),
    ],
)
async def test_addresses_that_are_none(url: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENV_HOME", str(tmp_path))
    monkeypatch.delenv("AENV_S3_ACCESS_KEY", raising=False)
    with pytest.raises(Invalid, match=message) as caught:
        await open_blobs(url)
    assert caught.value.hint
    assert "hidden" not in f"{caught.value} {caught.value.hint}"


# A folder


async def test_a_folder_where_none_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Exception, match="cannot hold packages") as caught:
        await open_blobs(f"file:{tmp_path / 'file'}")
    assert caught.value.hint  # type: ignore[attr-defined]


async def test_what_is_put_is_of_its_user_only(folder: FileBlobs) -> None:
    path = folder._path(await put(folder, b"x"))
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0


_WRITER = """
import asyncio, sys
from aenv.store.blobs import open_blobs

async def chunks():
    yield b"beginning"
    print("begun", flush=True)
    await asyncio.sleep(3600)

async def main():
    await (await open_blobs(sys.argv[1])).put(chunks(), most=100)

asyncio.run(main())
"""


async def test_what_a_killed_process_had_begun_is_swept_and_what_a_living_one_began_is_not(tmp_path: Path) -> None:
    url = f"file:{tmp_path / 'blobs'}"
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, url], stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None
        assert await asyncio.to_thread(writer.stdout.readline) == b"begun\n"
        coming = tmp_path / "blobs" / "coming"
        await open_blobs(url)
        assert len(list(coming.iterdir())) == 1
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        opened = await open_blobs(url)
        assert list(coming.iterdir()) == []
        assert await digests(opened) == set()
    finally:
        writer.kill()
        writer.wait()
        writer.stdout.close()


async def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a file system can be mounted by root only")
    try:
        opened = await open_blobs(f"file:{small / 'blobs'}")
        kept = await put(opened, b"small")
        with pytest.raises(StorageFull, match="no room is left") as caught:
            await opened.put(chunks(*[b"x" * 100_000] * 50), most=MOST)
        assert caught.value.status == 507
        assert caught.value.hint
        assert list((small / "blobs" / "coming").iterdir()) == []
        assert await digests(opened) == {kept}
        assert await put(opened, b"there is room for this")
    finally:
        subprocess.run(["umount", str(small)], check=True)


# A bucket


def test_signatures_are_those_of_the_standard() -> None:
    """The example in Amazon's documentation of Signature Version 4 for S3."""
    headers = {
        "host": "examplebucket.s3.amazonaws.com",
        "range": "bytes=0-9",
        "x-amz-content-sha256": hashlib.sha256(b"").hexdigest(),
        "x-amz-date": "20130524T000000Z",
    }
    keys = Keys("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    found = authorize("GET", "/test.txt", "", headers, headers["x-amz-content-sha256"], region="us-east-1", keys=keys)
    assert found == (
        "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, "
        "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date, "
        "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"
    )


async def test_a_bucket_that_does_not_let_us_in(s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidConfig, match="does not accept the key") as caught:
        await s3.blobs(keys=Keys(KEYS.access, "wrong-secret")).begin()
    assert "AENV_S3_SECRET_KEY" in str(caught.value.hint)
    assert "wrong-secret" not in f"{caught.value} {caught.value.hint}"
    monkeypatch.setenv("AENV_S3_ACCESS_KEY", KEYS.access)
    monkeypatch.setenv("AENV_S3_SECRET_KEY", KEYS.secret)
    with pytest.raises(InvalidConfig, match="does not exist"):
        await open_blobs(f"s3://another-bucket?endpoint={s3.endpoint}")


async def test_prefixes_are_apart(s3: Bucket) -> None:
    one, other = s3.blobs("one"), s3.blobs("one/below")
    mine, theirs = await put(one, b"mine"), await put(other, b"theirs")
    assert await digests(one) == {mine}
    assert await digests(other) == {theirs}
    assert not await one.exists(theirs)


async def test_a_bucket_that_is_away_for_a_moment_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It breaks off a request, then it is busy, then it fails, and then it takes the package."""
    monkeypatch.setattr(buckets, "_PAUSE", 0.001)
    answers = [b"", b"503 Slow Down", b"500 Internal Server Error", b"200 OK"]
    bodies: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        bodies.append(await reader.readexactly(7))
        if answer := answers[len(bodies) - 1]:
            writer.write(b"HTTP/1.1 %b\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % answer)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        await put(Bucket(server.sockets[0].getsockname()[1]).blobs(), b"at last")
    assert bodies == [b"at last"] * 4


async def test_a_bucket_that_is_gone_is_a_network_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "_PAUSE", 0.001)
    with pytest.raises(NetworkError, match="cannot connect"):
        await Bucket(free_port()).blobs().exists("0" * 64)
