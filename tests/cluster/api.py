"""An API server of Kubernetes with its etcd and nothing else, on the loopback: objects are kept, and no pod runs."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.cluster import components, material
from tests.store.servers import free_port

_PATIENCE = 120.0
_PROGRAMS = ("etcd", "openssl", "setpriv")


class ApiServer:
    """One that can be killed, halted and started again, with what it kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port, self._etcd, self._peers = free_port(), free_port(), free_port()
        components.certify(folder)
        self.kubeconfig = components.kubeconfig(folder, self.port)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def token(self) -> str:
        """Of the administrator."""
        return components.TOKEN

    @property
    def certificate(self) -> Path:
        """What its own is checked with."""
        return self.folder / "tls.crt"

    def certified(self) -> Path:
        """Another kubeconfig: the administrator by a certificate, with everything in the file itself."""
        return components.certified(self.folder, self.port)

    def start(self) -> None:
        """Start what does not run of ``etcd`` and ``apiserver``; returns when it answers."""
        options = ["--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none"]
        options += ["--disable-admission-plugins=ServiceAccount"]  # nobody makes the accounts
        commands = {
            "etcd": components.etcd(self.folder, self._etcd, self._peers),
            "apiserver": components.apiserver(self.folder, self.port, self._etcd, *options),
        }
        for name, command in commands.items():
            if name not in self._processes:
                with (self.folder / f"{name}.log").open("ab") as log:
                    # It ends with whoever started it, also when that is killed.
                    self._processes[name] = subprocess.Popen(
                        ["setpriv", "--pdeathsig", "KILL", *command], cwd=self.folder, stdout=log, stderr=log
                    )
        deadline = time.monotonic() + _PATIENCE
        while not is_ready(self.port, self.certificate):
            for name, process in self._processes.items():
                said = (self.folder / f"{name}.log").read_text(errors="replace")[-4000:]
                assert process.poll() is None, f"{name} ended:\n{said}"
                assert time.monotonic() < deadline, f"{name} does not answer:\n{said}"
            time.sleep(0.05)

    def kill(self, name: str = "apiserver") -> None:
        """End a part at once."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def halt(self, name: str = "apiserver") -> None:
        """A part is there, and says no word."""
        self._processes[name].send_signal(signal.SIGSTOP)

    def resume(self, name: str = "apiserver") -> None:
        """End a halt."""
        self._processes[name].send_signal(signal.SIGCONT)

    def end(self) -> None:
        """End all of it."""
        for name in list(self._processes):
            self.kill(name)


def missing() -> str:
    """Why none can be started here; empty when one can."""
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else material.missing()


def is_ready(port: int, certificate: Path) -> bool:
    """Whether an API server says that it is, and has the namespace that it makes itself, which it does after that."""
    context = ssl.create_default_context(cafile=str(certificate))
    with contextlib.closing(http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=context)) as connection:

        def asked(path: str) -> tuple[int, bytes]:
            connection.request("GET", path, headers={"Authorization": f"Bearer {components.TOKEN}"})
            answer = connection.getresponse()
            return answer.status, answer.read()

        try:
            return asked("/readyz") == (200, b"ok") and asked("/api/v1/namespaces/default")[0] == 200
        except (OSError, http.client.HTTPException):
            return False


@contextlib.contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    """One that keeps everything in a folder, until the block ends."""
    made = ApiServer(folder)
    try:
        made.start()
        yield made
    finally:
        made.end()
