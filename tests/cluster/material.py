"""The programs of Kubernetes, unpacked once and kept in ``.cache``, and images that are made of programs alone."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.support import ROOT

VERSION = "1.20.2"
PAUSE = "k8s.local/pause:3.2"
BUSYBOX = "aenv-test/busybox:1"
_NAME = f"kube-{VERSION}-linux-amd64"
_CACHE = ROOT / ".cache" / "kube"
_PATIENCE = 300
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def archive() -> Path:
    """Where the programs come from."""
    return Path(os.environ.get("AENV_TEST_KUBE_DIR") or ROOT.parent / "shared" / "kube") / f"{_NAME}.tar.zst"


def programs() -> Path:
    """Where they are, or will be."""
    return _CACHE / _NAME


def missing() -> str:
    """Why there are none; empty when they are there."""
    if (programs() / "kubelet").exists():
        return ""
    return f"needs Kubernetes: run 'make components' with {_NAME}.tar.zst in the directory of AENV_TEST_KUBE_DIR"


def make() -> None:
    """Unpack them, unless they are there."""
    made = programs()
    _CACHE.mkdir(parents=True, exist_ok=True)
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes side by side unpack it once
        if made.exists():
            return
        if not archive().exists() or shutil.which("zstd") is None:
            sys.stderr.write(f"no Kubernetes is unpacked for tests: that needs {_NAME}.tar.zst, and zstd\n")
            return
        sys.stderr.write("unpacking Kubernetes for tests\n")
        half = made.with_name(f"{_NAME}.{os.getpid()}")
        half.mkdir()
        try:
            command = ["tar", "--zstd", "--extract", "--no-same-owner", "--file", str(archive())]
            done = subprocess.run(command, cwd=half, capture_output=True, text=True, timeout=_PATIENCE, check=False)
            if done.returncode:
                raise SystemExit(f"{archive()} cannot be unpacked:\n{done.stderr[-4000:]}")
            half.rename(made)
        finally:
            shutil.rmtree(half, ignore_errors=True)


def pause() -> bytes:
    """The image that every pod has one container of."""
    return image(PAUSE, {"pause": programs() / "pause"}, command=["/pause"])


def busybox() -> bytes:
    """An image with a shell and its tools, and nothing else."""
    found = shutil.which("busybox")
    if found is None or subprocess.run(["ldd", found], capture_output=True, check=False).returncode == 0:
        pytest.skip("no static busybox (on Debian: apt install busybox-static)")
    listed = subprocess.run([found, "--list"], capture_output=True, text=True, timeout=60, check=True).stdout
    links = {f"bin/{tool}": "busybox" for tool in listed.split() if tool != "busybox"}
    return image(BUSYBOX, {"bin/busybox": Path(found)}, links, command=["sh"])


def image(
    name: str, files: Mapping[str, Path], links: Mapping[str, str] | None = None, *, command: Sequence[str]
) -> bytes:
    """An image of one layer with those files, as ``docker save`` writes it."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as inner:
        folder = tarfile.TarInfo("tmp")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o1777
        inner.addfile(folder)
        for place, path in files.items():
            content = path.read_bytes()
            _add(inner, place, content, 0o755)
        for place, target in (links or {}).items():
            link = tarfile.TarInfo(place)
            link.type, link.linkname = tarfile.SYMTYPE, target
            inner.addfile(link)
    config = {
        "architecture": _ARCHITECTURES[platform.machine()],
        "os": "linux",
        "config": {"Env": ["PATH=/bin"], "Cmd": list(command)},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer.getvalue()).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as outer:
        _add(outer, "config.json", json.dumps(config).encode())
        _add(outer, "layer.tar", layer.getvalue())
        _add(outer, "manifest.json", json.dumps(manifest).encode())
    return whole.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    archive.addfile(entry, io.BytesIO(content))
