"""A real S3 for tests: SeaweedFS, on free ports of the loopback."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from benchmarks import venvs

from aenv.errors import AEnvError
from aenv.store.bucket import Address, BucketBlobs, Keys
from tests.peers.support import requirements
from tests.store.servers import free_port

PATIENCE = 60.0
_ATTEMPTS = 3
KEYS = Keys("some-key", "some-secret")
BUCKET = "packages"


def program() -> str:
    """Where ``weed`` is; the test is skipped where it is not."""
    wanted = requirements("seaweed")
    if venvs.is_made(wanted):
        return str(venvs.python(wanted).with_name("weed"))
    found = shutil.which("weed")
    if found is None:
        pytest.skip("needs SeaweedFS: run 'make components'")
    return found


class Bucket:
    """A bucket in a running server."""

    def __init__(self, port: int) -> None:
        self.endpoint = f"http://127.0.0.1:{port}"

    def url(self, prefix: str = "") -> str:
        return f"s3://{BUCKET}/{prefix}?endpoint={self.endpoint}"

    def blobs(self, prefix: str = "", keys: Keys = KEYS) -> BucketBlobs:
        return BucketBlobs(Address(BUCKET, f"{prefix}/" if prefix else "", self.endpoint, "us-east-1"), keys)


@contextmanager
def seaweed(folder: Path) -> Iterator[Bucket]:
    """A server that runs until the block ends, with its bucket."""
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": KEYS.access, "secretKey": KEYS.secret}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    for attempt in range(_ATTEMPTS):
        port = free_port()
        log = folder / f"{attempt}.log"
        with log.open("wb") as opened:
            process = subprocess.Popen(
                _command(folder / str(attempt), folder / "s3.json", port),
                cwd=folder,
                stdout=opened,
                stderr=opened,
                env={**os.environ, "HOME": str(folder)},
            )
        try:
            if _keeps(process, server := Bucket(port)):
                yield server
                return
        finally:
            process.kill()
            process.wait()
    pytest.fail(log.read_text(errors="replace")[-4000:])


def _command(data: Path, config: Path, port: int) -> list[str]:
    data.mkdir()
    ports = {"s3.port": port, "s3.port.iceberg": 0, "s3.port.lance": 0}
    for part in ("master", "volume", "filer"):
        ports |= {f"{part}.port": free_port()}
    for part in ("master", "volume", "filer", "s3"):
        ports |= {f"{part}.port.grpc": free_port()}
    return [
        *(program(), "server", "-ip=127.0.0.1", f"-dir={data}", "-filer", "-s3", f"-s3.config={config}"),
        *(f"-{name}={value}" for name, value in ports.items()),
        *(f"-{part}.localSocket={data / part}.sock" for part in ("filer", "s3")),
        *("-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=8"),
    ]


def _keeps(process: subprocess.Popen[bytes], server: Bucket) -> bool:
    """Whether it has the bucket and can keep something there. It ends when one of its ports is another's already."""

    async def content() -> AsyncIterator[bytes]:
        yield b"something"

    async def make() -> bool:
        deadline = time.monotonic() + PATIENCE
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(AEnvError):
                assert (await server.blobs()._ask("PUT", "")).status in (200, 409, 500, 503)
                await server.blobs("first").put(content(), most=100)
                return True
            await asyncio.sleep(0.1)
        return False

    return asyncio.run(make())
