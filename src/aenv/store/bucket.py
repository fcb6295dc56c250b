"""Blobs in a bucket that speaks the protocol of S3: requests signed by Signature Version 4, with nothing but ``http``.

What is put lies in a file without a name until its digest is known, so one request carries it, and may be sent again.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import html
import random
import re
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.parse import parse_qsl, quote, urlsplit

from aenv import config, http
from aenv.cleanup import finish
from aenv.errors import AEnvError, Invalid, InvalidConfig, NetworkError, StorageFull, TooLarge
from aenv.store.blobs import Blob, Blobs, check_digest, checked, missing, unusable, write_all

PIECE = 8 * 1024 * 1024
"""Bytes of one request for a part of a blob."""
_SILENCE = 60.0
"""Seconds that a server may be silent."""
_LISTED_AT_ONCE = 1000
_ATTEMPTS = 5
_PAUSE = 0.1
_AGAIN = (429, 500, 502, 503, 504)
_MOST_ANSWER = 4 * 1024 * 1024
_REGION = "us-east-1"
_NOTHING = hashlib.sha256(b"").hexdigest()
_HINT = "use s3://bucket/prefix?endpoint=https://host:port&region=name"
_KEYS = "set s3_access_key and s3_secret_key, or AENV_S3_ACCESS_KEY and AENV_S3_SECRET_KEY"
_LISTED = re.compile(r"<Contents>(.*?)</Contents>", re.DOTALL)


class Address(NamedTuple):
    """Where a URL points."""

    bucket: str
    prefix: str
    """Empty, or with a slash at its end."""
    endpoint: str
    region: str


class Keys(NamedTuple):
    """What requests are signed with."""

    access: str
    secret: str
    session: str | None = None


class Refused(AEnvError):
    """The server answered, but with an error."""


async def open_bucket(url: str) -> BucketBlobs:
    """The blobs in the bucket of ``s3://bucket/prefix?endpoint=...``; it must be there."""
    address = parse(url)
    access, secret = config.get("s3_access_key"), config.get("s3_secret_key")
    if not access or not secret:
        raise InvalidConfig(f"there is no key to the bucket {address.bucket!r}", hint=_KEYS)
    opened = BucketBlobs(address, Keys(access, secret, config.get("s3_session_token")))
    await opened.begin()
    return opened


def parse(url: str) -> Address:
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
    except ValueError:
        raise Invalid("the address of the packages is none of a bucket", hint=_HINT) from None
    if parts.username or parts.password:
        raise Invalid("a key does not belong into the address of a bucket", hint=_KEYS)
    unknown = options.keys() - {"endpoint", "region"}
    if not re.fullmatch("[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", parts.netloc) or unknown:
        raise Invalid("the address of the packages is none of a bucket", hint=_HINT)
    prefix = parts.path.strip("/")
    region = options.get("region", _REGION)
    endpoint = options.get("endpoint", f"https://s3.{region}.amazonaws.com")
    http.target(endpoint)
    return Address(parts.netloc, f"{prefix}/" if prefix else "", endpoint, region)


class BucketBlobs(Blobs):
    """Blobs as objects, below a prefix."""

    def __init__(self, address: Address, keys: Keys) -> None:
        self._address = address
        self._keys = keys
        self._where = f"the bucket {address.bucket!r} at {http.target(address.endpoint).shown}"

    async def begin(self) -> None:
        """See whether the bucket is there, and ours to use."""
        response = await self._ask("GET", "", {"list-type": "2", "max-keys": "1"})
        if response.status == 404:
            raise InvalidConfig(f"{self._where} does not exist", hint="make it, or name another one")
        if response.status in (400, 401, 403):
            raise InvalidConfig(f"{self._where} does not accept the key: {_told(response.body)}", hint=_KEYS)
        self._check(response, "list it")

    async def put(self, chunks: AsyncIterator[bytes], *, most: int) -> tuple[str, int]:
        with tempfile.TemporaryFile(buffering=0) as file:
            digest, size = hashlib.sha256(), 0
            async for chunk in chunks:
                size += len(chunk)
                if size > most:
                    raise TooLarge(f"the package has more than {most} bytes")
                digest.update(chunk)
                await _write(file, chunk)
            found = digest.hexdigest()
            await self._send(file, found, size)
        return found, size

    async def open(self, digest: str) -> AsyncIterator[bytes]:
        check_digest(digest)
        async for piece in checked(self._pieces(digest), digest, f"{digest} in {self._where}"):
            yield piece

    async def exists(self, digest: str) -> bool:
        return await self._modified(digest) is not None

    async def delete(self, digest: str, *, before: float | None = None) -> bool:
        if before is not None:
            modified = await self._modified(digest)
            if modified is not None and modified >= before:
                return False
        check_digest(digest)
        response = await self._ask("DELETE", self._key(digest))
        if response.status != 404:
            self._check(response, f"delete {digest}")
        return True

    async def all(self) -> AsyncIterator[Blob]:
        query = {"list-type": "2", "prefix": self._address.prefix, "max-keys": str(_LISTED_AT_ONCE)}
        while True:
            response = await self._ask("GET", "", query)
            self._check(response, "list it")
            text = response.body.decode(errors="replace")
            for entry in _LISTED.findall(text):
                digest = html.unescape(_field(entry, "Key")).removeprefix(self._address.prefix)
                if re.fullmatch("[0-9a-f]{64}", digest):
                    modified = datetime.fromisoformat(_field(entry, "LastModified"))
                    yield Blob(digest, int(_field(entry, "Size")), modified.timestamp())
            token = html.unescape(_field(text, "NextContinuationToken"))
            if _field(text, "IsTruncated") != "true" or not token:
                return
            query["continuation-token"] = token

    async def _send(self, file: BinaryIO, digest: str, size: int) -> None:
        path = self._path(self._key(digest))
        for attempt in range(_ATTEMPTS):
            file.seek(0)
            headers = self._signed("PUT", path, "", digest)
            try:
                async with http.stream(
                    *("PUT", self._address.endpoint, path),
                    headers=headers,
                    body=_chunks(file),
                    size=size,
                    patience=_SILENCE,
                ) as answer:
                    response = http.Response(answer.status, answer.headers, await answer.read(_MOST_ANSWER))
                if response.status not in _AGAIN or attempt == _ATTEMPTS - 1:
                    self._check(response, f"put {digest} there")
                    return
            except NetworkError:
                if attempt == _ATTEMPTS - 1:
                    raise
            await _pause(attempt)

    async def _pieces(self, digest: str) -> AsyncIterator[bytes]:
        start = 0
        total = 1
        while start < total:
            wanted = {"Range": f"bytes={start}-{start + PIECE - 1}"}
            response = await self._ask("GET", self._key(digest), headers=wanted, most=PIECE)
            if response.status == 404:
                raise missing(digest)
            if response.status == 416 and start == 0:
                return  # it is empty
            self._check(response, f"read {digest}")
            place = re.search(rb"/(\d+)$", response.headers.get(b"content-range", b""))
            total = int(place[1]) if place else len(response.body)
            if not response.body:
                raise NetworkError(f"{self._where} sent nothing of {digest}")
            start += len(response.body)
            yield response.body

    async def _modified(self, digest: str) -> float | None:
        """When a blob was put last; None when there is none."""
        check_digest(digest)
        response = await self._ask("GET", self._key(digest), headers={"Range": "bytes=0-0"}, most=PIECE)
        if response.status == 404:
            return None
        if response.status != 416:
            self._check(response, f"look for {digest}")
        try:
            return parsedate_to_datetime(response.headers[b"last-modified"].decode()).timestamp()
        except (KeyError, ValueError):
            return time.time()

    async def _ask(
        self,
        method: str,
        key: str,
        query: Mapping[str, str] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        most: int = _MOST_ANSWER,
    ) -> http.Response:
        path = self._path(key)
        asked = "&".join(f"{_quoted(name)}={_quoted(value)}" for name, value in sorted((query or {}).items()))
        lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items()).encode()
        for attempt in range(_ATTEMPTS):
            signed = self._signed(method, path, asked, _NOTHING)
            try:
                async with asyncio.timeout(_SILENCE) as limit:
                    response = await http.request(
                        *(method, self._address.endpoint, f"{path}?{asked}" if asked else path),
                        headers=signed + lines,
                        retries=0,
                        repeatable=True,
                        most=most,
                    )
                if response.status not in _AGAIN or attempt == _ATTEMPTS - 1:
                    return response
            except NetworkError:
                if attempt == _ATTEMPTS - 1:
                    raise
            except TimeoutError:
                if not limit.expired():
                    raise
                raise NetworkError(f"{self._where} did not answer within {_SILENCE:g} s") from None
            await _pause(attempt)
        raise AssertionError("the last attempt answers or raises")

    def _signed(self, method: str, path: str, query: str, payload: str) -> bytes:
        """The headers that prove that this request is ours."""
        where = http.target(self._address.endpoint)
        now = datetime.now(UTC)
        headers = {
            "host": where.head.decode().partition(": ")[2].strip(),
            "x-amz-content-sha256": payload,
            "x-amz-date": now.strftime("%Y%m%dT%H%M%SZ"),
        }
        if self._keys.session:
            headers["x-amz-security-token"] = self._keys.session
        authorization = authorize(
            *(method, f"{where.prefix}{path}", query, headers, payload), region=self._address.region, keys=self._keys
        )
        sent = {name: value for name, value in headers.items() if name != "host"} | {"Authorization": authorization}
        return "".join(f"{name}: {value}\r\n" for name, value in sent.items()).encode()

    def _key(self, digest: str) -> str:
        return f"{self._address.prefix}{digest}"

    def _path(self, key: str) -> str:
        bucket = f"/{self._address.bucket}"
        return f"{bucket}/{quote(key, safe='/~')}" if key else bucket

    def _check(self, response: http.Response, what: str) -> None:
        if response.status < 300:
            return
        told = _told(response.body)
        if response.status == 507 or "StorageFull" in told or "QuotaExceeded" in told:
            raise StorageFull(f"no room is left in {self._where}", hint="make room there; nothing was changed")
        raise Refused(
            f"{self._where} refuses to {what}: {response.status} {told}".rstrip(), hint="see the log of that server"
        )


def authorize(
    method: str, path: str, query: str, headers: Mapping[str, str], payload: str, *, region: str, keys: Keys
) -> str:
    """The ``Authorization`` of a request by Signature Version 4. All of ``headers``, in lower case, are signed."""
    date = headers["x-amz-date"]
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    request = "\n".join((method, path, query, lines, names, payload))
    scope = f"{date[:8]}/{region}/s3/aws4_request"
    text = "\n".join(("AWS4-HMAC-SHA256", date, scope, hashlib.sha256(request.encode()).hexdigest()))
    key = f"AWS4{keys.secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.new(key, text.encode(), "sha256").hexdigest()
    return f"AWS4-HMAC-SHA256 Credential={keys.access}/{scope}, SignedHeaders={names}, Signature={signature}"


async def _write(file: BinaryIO, chunk: bytes) -> None:
    try:
        await finish(asyncio.to_thread(write_all, file.fileno(), chunk))
    except OSError as exc:
        raise unusable(Path(tempfile.gettempdir()), exc) from exc


async def _chunks(file: BinaryIO) -> AsyncIterator[bytes]:
    while chunk := await asyncio.to_thread(file.read, 256 * 1024):
        yield chunk


async def _pause(attempt: int) -> None:
    await asyncio.sleep(_PAUSE * 2**attempt * (0.5 + random.random()))  # noqa: S311


def _quoted(text: str) -> str:
    return quote(text, safe="-_.~")


def _field(text: str, name: str) -> str:
    found = re.search(f"<{name}>(.*?)</{name}>", text, re.DOTALL)
    return found[1] if found else ""


def _told(body: bytes) -> str:
    """What an error of the server says."""
    text = body[:4096].decode(errors="replace")
    return " ".join(part for part in (_field(text, "Code"), _field(text, "Message")) if part)[:300]
