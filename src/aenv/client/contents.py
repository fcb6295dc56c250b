"""What is uploaded, as bytes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from aenv.errors import Invalid


async def content_of(given: bytes | str | os.PathLike[str]) -> bytes:
    """Bytes as they are, text in UTF-8, or what the local file at a ``Path`` holds."""
    if isinstance(given, os.PathLike):
        return await asyncio.to_thread(_read, given)
    if isinstance(given, str):
        return given.encode()
    if not isinstance(given, (bytes, bytearray, memoryview)):
        raise Invalid(f"a {type(given).__name__} cannot be uploaded", hint="give bytes, str or a local Path")
    return bytes(given)


def _read(path: os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as exc:
        raise Invalid(f"the local file {os.fspath(path)} cannot be read: {exc.strerror or exc}") from exc
