"""Attacks on memory: looking for what belongs to others in this process and in memory that processes share."""

import ctypes
import hashlib
import os
from pathlib import Path

_LARGEST = 256 * 1024 * 1024


def scan(begins: str, digest: str, size: int) -> int:
    """How often a secret is in this process's memory. Only its beginning is known, and the digest of all of it, so
    that the search does not find itself."""
    start, found = begins.encode(), 0
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # who changed its user may not look into itself, until it says so
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
        for line in maps.readlines():
            span, rights, *_ = line.split()
            low, high = (int(part, 16) for part in span.split("-"))
            if "r" not in rights or "[v" in line or high - low > _LARGEST:
                continue
            try:
                memory.seek(low)
                data = memory.read(high - low)
            except (OSError, OverflowError, ValueError):
                continue
            place = data.find(start)
            while place >= 0:
                found += hashlib.sha256(data[place : place + size]).hexdigest() == digest
                place = data.find(start, place + 1)
    return found


def leave(key: int, text: str) -> list[str]:
    """Put a text wherever processes can share something; the ways that worked."""
    left = []
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    identifier = libc.shmget(key, 4096, 0o1666)
    if identifier >= 0:
        address = libc.shmat(identifier, None, 0)
        ctypes.memmove(address, text.encode() + b"\0", len(text) + 1)
        left.append("shm")
    queue = libc.msgget(key, 0o1666)
    if queue >= 0 and libc.msgsnd(queue, b"\1" + bytes(7) + text.encode(), len(text), 0) == 0:
        left.append("msg")
    if libc.semget(key, 1, 0o1666) >= 0:
        left.append("sem")
    if libc.mq_open(f"/aenv{key}".encode(), os.O_RDWR | os.O_CREAT, 0o666, None) >= 0:
        left.append("mq")
    for folder in ("/dev/shm", "/tmp", "/project", "/home/sandbox", "/run"):
        try:
            Path(folder, f"aenv{key}").write_text(text)
        except OSError:
            continue
        left.append(folder)
    return left


def find(key: int) -> list[str]:
    """Look for what another left under that key."""
    found = []
    libc = ctypes.CDLL(None, use_errno=True)
    for name, get in (("shm", lambda: libc.shmget(key, 0, 0)), ("msg", lambda: libc.msgget(key, 0))):
        if get() >= 0:
            found.append(name)
    if libc.semget(key, 0, 0) >= 0:
        found.append("sem")
    if libc.mq_open(f"/aenv{key}".encode(), os.O_RDONLY) >= 0:
        found.append("mq")
    folders = ("/dev/shm", "/tmp", "/project", "/home/sandbox", "/run")
    found += [folder for folder in folders if os.path.exists(f"{folder}/aenv{key}")]
    for name in ("shm", "msg", "sem"):
        with open(f"/proc/sysvipc/{name}") as file:
            if len(file.readlines()) > 1:
                found.append(f"/proc/sysvipc/{name}")
    return found
