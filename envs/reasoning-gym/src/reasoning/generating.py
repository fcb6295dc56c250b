"""The puzzles of Reasoning Gym: one for a dataset, a seed and an index, the same in every process.

Some generators draw random numbers from a source that everybody shares, and some walk through sets of texts, whose
order changes from one interpreter to the next. The first are seeded here. The second run in a process of their own,
in which texts have fixed hashes; that is this file as a program.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
import subprocess
import sys
import threading
import zlib
from functools import lru_cache
from typing import Any, BinaryIO

import numpy as np
import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS

SIZE = 500
"""Puzzles of a dataset for one seed, the library's own number. Some datasets differ when they have another size."""
UNMADE = "composite"
"""A mixture of other datasets, which a configuration names: there is nothing to make without one."""
NAMES = tuple(name for name in DATASETS if name != UNMADE)
HASHED = frozenset(
    {
        "intermediate_integration",
        "isomorphic_strings",
        "knight_swap",
        "polynomial_multiplication",
        "ransom_note",
        "word_ladder",
    }
)
"""Those that come out differently when texts have other hashes."""

Entry = dict[str, Any]


def entry(name: str, seed: int, index: int) -> Entry:
    """One puzzle: its question, answer and metadata."""
    return _elsewhere.entry(name, seed, index) if name in HASHED else _made(name, seed, index)


@lru_cache(maxsize=8)
def dataset(name: str, seed: int) -> ProceduralDataset:
    """A dataset, which makes puzzles and scores answers."""
    _seed(name, seed)
    return reasoning_gym.create_dataset(name, size=SIZE, seed=seed)


def _made(name: str, seed: int, index: int) -> Entry:
    found = dataset(name, seed)
    _seed(name, seed, index)
    made: Entry = found[index]
    return made


def _seed(*parts: object) -> None:
    number = zlib.crc32(repr(parts).encode())
    random.seed(number)
    np.random.seed(number)


class _Elsewhere:
    """The process in which texts have fixed hashes. It starts when it is first asked, and ends with this one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def entry(self, name: str, seed: int, index: int) -> Entry:
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{json.dumps([name, seed, index])}\n".encode())
            process.stdin.flush()
            (length,) = struct.unpack("I", _read(process.stdout, 4))
            made: Entry = pickle.loads(_read(process.stdout, length))  # noqa: S301 - of this file's own process
            return made

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-P", __file__],
                env={**os.environ, "PYTHONHASHSEED": "0"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        return self._process

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


_elsewhere = _Elsewhere()
close = _elsewhere.close


def _read(stream: Any, length: int) -> bytes:
    found: bytes = stream.read(length)
    if len(found) < length:
        raise RuntimeError("the process that makes puzzles has ended")
    return found


def _serve(asked: BinaryIO, told: BinaryIO) -> None:
    for line in asked:
        made = pickle.dumps(_made(*json.loads(line)))
        told.write(struct.pack("I", len(made)) + made)
        told.flush()


if __name__ == "__main__":
    _told = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # generators print
    _serve(sys.stdin.buffer, _told)
