"""What is saved of a terminal and of its files, as JSON that keeps every byte."""

from __future__ import annotations

import os
from base64 import b64decode, b64encode
from typing import Any

from mini_terminal.baseline import Baseline, Entry
from mini_terminal.terminal import Kept


def from_terminal(kept: Kept) -> dict[str, Any]:
    directory = None if kept.directory is None else _from_path(kept.directory)
    return {"directory": directory, "state": _text(kept.state), "status": kept.status, "mark": kept.mark}


def to_terminal(given: dict[str, Any]) -> Kept:
    directory = None if given["directory"] is None else _to_path(given["directory"])
    return Kept(directory, b64decode(given["state"]), given["status"], given["mark"])


def from_baseline(baseline: Baseline) -> dict[str, Any]:
    entries = [[_from_path(name), entry.mode, _text(entry.content)] for name, entry in baseline.entries.items()]
    return {"directory": _from_path(baseline.directory), "entries": entries}


def to_baseline(given: dict[str, Any]) -> Baseline:
    entries = {_to_path(name): Entry(mode, b64decode(content)) for name, mode, content in given["entries"]}
    return Baseline(_to_path(given["directory"]), entries)


def _text(data: bytes) -> str:
    return b64encode(data).decode()


def _from_path(path: str) -> str:
    return _text(os.fsencode(path))


def _to_path(text: str) -> str:
    return os.fsdecode(b64decode(text))
