"""Trajectories in files: JSON, one a line, read as they come and written so that a kill loses none that was written."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from aenv.errors import Conflict, Invalid, NotFound, StorageFull
from aenv.models import to_json
from aenv.rl.trajectory import SCHEMA, Trajectory

MIGRATIONS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""By the schema that a line has: how to make one of the next version out of it, with that in its ``schema``."""
NAME = "trajectories.jsonl"
"""What the file is called in the folder of a run."""
_BLOCK = 1024 * 1024


def located(path: str | os.PathLike[str]) -> Path:
    """The file of trajectories that is meant: itself, or the one in the folder of a run."""
    return Path(path, NAME) if Path(path).is_dir() else Path(path)


def read(path: str | os.PathLike[str]) -> Iterator[Trajectory]:
    """The trajectories of a file, or of a run's folder, one after the other.

    What is no trajectory is an ``Invalid`` that names the line.

    A last line that is not whole was being written when its writer was killed, and is passed over.
    """
    file = located(path)
    try:
        with open(file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.isspace() and (line.endswith(b"\n") or _is_whole(line)):
                    yield parse(line, f"{file}:{number}")
    except FileNotFoundError as exc:
        raise NotFound(f"there is no file {file}", hint="'aenv rollout --out' writes one") from exc


def parse(line: bytes | str, where: str = "the line") -> Trajectory:
    """A trajectory from one line, whatever version of the format it has."""
    try:
        raw = msgspec.json.decode(line)
        schema = raw.get("schema") if isinstance(raw, dict) else None
        while isinstance(schema, str) and schema != SCHEMA and schema in MIGRATIONS:
            raw = MIGRATIONS[schema](raw)
            schema = raw["schema"]
        if schema == SCHEMA:
            return msgspec.convert(raw, Trajectory)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as exc:
        raise Invalid(f"{where} is no trajectory: {exc}", hint=f"each line is one of {SCHEMA}") from exc
    hint = "a newer aenv wrote it: update this one" if str(schema).startswith("aenv.trajectory/") else None
    shown = "no schema" if schema is None else f"the schema {str(schema)[:100]!r}"
    raise Invalid(f"{where} has {shown}, and this is for {SCHEMA}", hint=hint or "name a file of trajectories")


def _is_whole(line: bytes) -> bool:
    """Whether a line without an end lacks nothing else: no part of an object is JSON."""
    try:
        msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


def line_of(trajectory: Trajectory) -> bytes:
    """A trajectory as one line."""
    return to_json(trajectory) + b"\n"


class Writer:
    """Appends to a file, for the length of a ``with`` block. Only one process at a time may do so.

    A trajectory that ``write`` returned for is in the file, also when this process is killed right after.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = -1

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._mend()
        except BaseException as exc:
            os.close(self._file)
            if isinstance(exc, BlockingIOError):
                hint = "wait for it, or write to another place"
                raise Conflict(f"another process writes to {self.path}", hint=hint) from exc
            raise
        return self

    def write(self, trajectory: Trajectory) -> None:
        """Put a trajectory at the end of the file: all of it, or, where there is no room, nothing."""
        data = memoryview(line_of(trajectory))
        before = os.fstat(self._file).st_size
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as exc:
            os.ftruncate(self._file, before)
            raise StorageFull(f"{self.path} cannot be written: {exc.strerror}", hint="make room, and resume") from exc

    def _mend(self) -> None:
        """Cut off a last line that its writer was killed in, or end one that only lacks its end."""
        end = size = os.fstat(self._file).st_size
        while end:
            begin = max(end - _BLOCK, 0)
            found = os.pread(self._file, end - begin, begin).rfind(b"\n")
            end = begin + found + 1 if found >= 0 else begin
            if found >= 0:
                break
        if end < size and _is_whole(os.pread(self._file, size - end, end)):
            os.write(self._file, b"\n")
        elif end < size:
            os.ftruncate(self._file, end)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            os.fsync(self._file)
        finally:
            os.close(self._file)
