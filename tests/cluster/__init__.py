"""A real one-node Kubernetes for tests, once for all the processes of a run, with pods and all.

It lives on the ground of the run's daemons, in their namespaces, next to Docker and the registry if these are there,
and ends with the last process that uses it, also when that is killed. Its API server has the same address out here as
in there; pods are dialled from inside.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aenv.engines.docker.daemon import Daemon
from tests import daemons
from tests.cluster import api, components, material
from tests.store.servers import free_port

PATIENCE = 180.0
"""Seconds that anything may take on a busy machine before a test calls it stuck."""
KINDS = ("pods", "services", "persistentvolumeclaims", "leases", "deployments", "secrets", "configmaps")
_EVERY_NAMESPACE_HAS = ("secret/default-token-", "configmap/kube-root-ca.crt")
_PROGRAMS = (
    *("etcd", "containerd", "ctr", "runc", "iptables", "conntrack", "socat", "openssl", "kubectl"),
    *("mount", "sysctl"),
)
_PLUGINS = Path("/usr/lib/cni")
_FORWARD = Path(daemons.__file__).parent / "forward.py"
_MOST_IMAGE = 2 * 1024**3
_STORAGE = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {"name": "standard", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
    "provisioner": "kubernetes.io/host-path",
}
_CLONE_NEWNET = 0x40000000


class Cluster:
    """A cluster that tests may use, and not break."""

    def __init__(self, kubeconfig: Path, cache: Path | None = None) -> None:
        self.kubeconfig = kubeconfig
        self._options = ["--kubeconfig", str(kubeconfig), *(["--cache-dir", str(cache)] if cache else [])]

    @property
    def inside(self) -> list[str]:
        """What a command begins with that can dial pods."""
        return []

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """This thread, and what it starts, can dial pods until the block ends."""
        yield

    def kubectl(self, *words: str, input: str | None = None, patience: float = PATIENCE) -> str:
        """Run kubectl; what it prints."""
        done = subprocess.run(
            ["kubectl", *self._options, *words],
            input=input or "",
            capture_output=True,
            text=True,
            timeout=patience,
            check=False,
        )
        assert done.returncode == 0, f"kubectl {' '.join(words)} ended with {done.returncode}:\n{done.stderr}"
        return done.stdout

    def apply(self, namespace: str, *objects: dict[str, Any]) -> None:
        """Make objects in a namespace, or change them."""
        held = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "--namespace", namespace, "--filename", "-", input=json.dumps(held))

    def get(self, namespace: str, *what: str) -> dict[str, Any]:
        """An object, or a list of them."""
        found: dict[str, Any] = json.loads(self.kubectl("get", "--namespace", namespace, "--output", "json", *what))
        return found

    def left(self, namespace: str, *kinds: str) -> list[str]:
        """What is in a namespace, as ``pod/name``, without what every namespace has."""
        found = self.kubectl("get", "--namespace", namespace, "--output", "name", ",".join(kinds or KINDS)).split()
        return [name for name in found if not name.startswith(_EVERY_NAMESPACE_HAS)]

    @contextlib.contextmanager
    def namespace(self) -> Iterator[str]:
        """A new one, which is gone after the block."""
        name = f"aenv-test-{secrets.token_hex(4)}"
        self.kubectl("create", "namespace", name)
        try:
            yield name
        finally:
            # Pods have a grace period; what is to be gone is gone at once.
            self.kubectl("delete", "pods", "--all", "--namespace", name, "--grace-period=0", "--force", "--wait=false")
            self.kubectl("delete", "namespace", name, f"--timeout={PATIENCE:g}s", patience=PATIENCE + 10)


class Local(Cluster):
    """A cluster of this run, each program of which can be killed, halted and started again."""

    def __init__(self, ground: daemons.Ground) -> None:
        self.ground = ground
        self.folder = ground.folder / "kube"
        super().__init__(self.folder / "kubeconfig", self.folder / "kubectl")

    @property
    def inside(self) -> list[str]:
        return ["nsenter", f"--net={self._network}", "--"]

    @property
    def _network(self) -> str:
        return f"/proc/{(self.ground.folder / 'holder').read_text()}/ns/net"

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        with open("/proc/thread-self/ns/net") as ours, open(self._network) as theirs:
            _outer.append(ours.fileno())
            _enter(theirs.fileno())
            try:
                yield
            finally:
                _enter(_outer.pop())

    @property
    def port(self) -> int:
        """Of the API server."""
        return int((self.folder / "port").read_text())

    def up(self) -> None:
        """Start what does not run, and wait until pods can be run."""
        self.folder.mkdir(exist_ok=True)
        with daemons.locked(self.folder / "starting"):
            if not (self.folder / "port").exists():
                self._prepare()
            for name in self._parts:
                self.start(name)
            self._await("the node", self.is_ready)

    def is_ready(self) -> bool:
        """Whether the node takes pods."""
        with contextlib.suppress(AssertionError):
            node = json.loads(self.kubectl("get", "node", components.NODE, "--output", "json"))
            states = {state["type"]: state["status"] for state in node["status"]["conditions"]}
            return states["Ready"] == "True" and not node["spec"].get("taints")
        return False

    def start(self, name: str) -> None:
        """Start a part again, unless it runs: etcd, apiserver, controllers, scheduler, kubelet and the others."""
        command, files, is_up = self._parts[name]()
        self.ground.started(f"kube/{name}", command, is_up, files)

    def kill(self, name: str) -> None:
        """End a part at once, and wait until it has ended."""
        self.ground.kill(f"kube/{name}")

    def halt(self, name: str) -> None:
        """A part takes part in nothing any more: it is there, and says no word."""
        self.ground.signal(f"kube/{name}", "STOP")

    def resume(self, name: str) -> None:
        """End a halt."""
        self.ground.signal(f"kube/{name}", "CONT")

    def kill_containers(self, namespace: str, pod: str) -> None:
        """Kill the first process of each container of a pod, which its node then starts again if it is to."""
        for status in self.get(namespace, "pod", pod)["status"]["containerStatuses"]:
            id = status["containerID"].removeprefix("containerd://")
            self._ctr("tasks", "kill", "--signal", "SIGKILL", id)

    def bring(self, archive: bytes, name: str, *names: str) -> None:
        """Have an image on the node, as ``docker save`` writes it, and by more names; once."""
        mark = self.folder / "images" / name.replace("/", "_")
        mark.parent.mkdir(exist_ok=True)
        with daemons.locked(self.folder / "bringing"):
            if not mark.exists():
                self._ctr("images", "import", "-", input=archive)
                for other in names:
                    self._ctr("images", "tag", "--force", full(name), full(other))
                mark.touch()

    def bring_from(self, address: str, name: str, *names: str) -> None:
        """Have an image of a Docker daemon on the node, by its name and by more; once."""
        if not (self.folder / "images" / name.replace("/", "_")).exists():
            content = Daemon(address).fetch(f"/images/{name}/get", most=_MOST_IMAGE, timeout=PATIENCE)
            self.bring(daemons.awaited(content), name, *names)

    def _ctr(self, *words: str, input: bytes = b"") -> None:
        address = f"{self.folder}/containerd/containerd.sock"
        command = self.ground.command("ctr", "--address", address, "--namespace", "k8s.io", *words)
        done = subprocess.run(command, input=input, capture_output=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, f"ctr {' '.join(words)}: {done.stderr.decode(errors='replace')}"

    @property
    def _parts(self) -> dict[str, Callable[[], _Part]]:
        """In the order in which they are started."""
        return {
            "etcd": lambda: (components.etcd(self.folder, 2379, 2380), {}, self._listens(2379)),
            "apiserver": self._apiserver,
            "containerd": lambda: (*components.containerd(self.folder), self._answers),
            "controllers": lambda: (components.controllers(self.folder), {}, self._listens(10257)),
            "storage": lambda: (components.storage(), {}, lambda: self.ground.runs("kube/storage")),
            "scheduler": lambda: (components.scheduler(self.folder), {}, self._listens(10259)),
            "kubelet": self._kubelet,
            "proxy": lambda: (components.proxy(self.folder), {}, self._listens(10256)),
        }

    def _apiserver(self) -> _Part:
        options = ["--bind-address=0.0.0.0", f"--advertise-address={components.NODE_ADDRESS}"]
        options += ["--kubelet-preferred-address-types=InternalIP"]
        command = components.apiserver(self.folder, self.port, 2379, *options)
        return command, {}, lambda: api.is_ready(self.port, self.folder / "tls.crt")

    def _kubelet(self) -> _Part:
        if not (self.folder / "images" / "pause").exists():
            self.bring(material.pause(), "pause")
        command, files = components.kubelet(self.folder, daemons.group_of(self.ground.folder))
        return command, files, self._listens(10248)

    def _listens(self, port: int) -> Callable[[], bool]:
        return lambda: self.ground.listens(port)

    def _answers(self) -> bool:
        try:
            self._ctr("version")
        except (AssertionError, subprocess.TimeoutExpired):
            return False
        return True

    def _prepare(self) -> None:
        """Give it a network, a place for each directory that programs have a fixed one of, and the way in from here."""
        ground = self.ground
        components.certify(self.folder)
        for words in (
            f"ip link add node0 type bridge && ip addr add {components.NODE_ADDRESS}/24 dev node0",
            # Services are dialled from the node, too, which has no way out by which they could be.
            f"ip link set node0 up && ip route add {components.SERVICES} dev node0",
            "sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.route_localnet=1",
            # Docker, on the same ground, lets nothing pass that is not its own.
            f"iptables -I FORWARD -s {components.PODS} -j ACCEPT && iptables -I FORWARD -d {components.PODS} -j ACCEPT",
            # What is kept in /var is this node's own, and goes with it.
            "mkdir -p /run/kube/upper /run/kube/work",
            "mount -t overlay -o lowerdir=/var,upperdir=/run/kube/upper,workdir=/run/kube/work overlay /var",
            f"mkdir -p {components.VOLUMES} {self.folder}/volumes",
            f"mount --bind {self.folder}/volumes {components.VOLUMES}",
        ):
            ground.run("sh", "-c", words)
        for top in (daemons.GROUPS, *daemons.GROUPS.glob("*/")):
            if (top / "cgroup.procs").exists():
                (top / daemons.group_of(ground.folder)).mkdir(exist_ok=True)
        port = free_port()
        with socket.create_server(("127.0.0.1", port), backlog=128) as listener:
            command = [sys.executable, str(_FORWARD), str(listener.fileno()), str(port)]
            ground.started("kube/forward", command, lambda: True, pass_fds=[listener.fileno()])
        components.kubeconfig(self.folder, port)
        (self.folder / "port").write_text(str(port))

    def _await(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < deadline, f"waited in vain for {what}, see {self.folder}"
            time.sleep(0.1)


_outer: list[int] = []
"""The networks that this process came from, the first of them first."""
_Part = tuple[list[str], dict[str, str], Callable[[], bool]]
"""A command, the files that it reads, and how one sees that it is up."""


def full(name: str) -> str:
    """What an image is called in full: a name without a host is one of Docker's."""
    host, slash, _ = name.partition("/")
    if not slash:
        return f"docker.io/library/{name}"
    return name if host == "localhost" or set(".:") & set(host) else f"docker.io/{name}"


def missing() -> str:
    """Why no cluster can be started here; empty when one can."""
    if reason := daemons.missing(*_PROGRAMS) or material.missing():
        return reason
    return (
        "" if (_PLUGINS / "bridge").exists() else f"not installed: the plugins for networks of containers in {_PLUGINS}"
    )


@contextlib.contextmanager
def cluster(run: str) -> Iterator[Local]:
    """The cluster of a run, shared by all its processes, until the block ends."""
    with daemons.ground(run) as ground:
        made = Local(ground)
        made.up()
        made.apply("default", _STORAGE)
        yield made


def _enter(namespace: int) -> None:
    """Go into a network with this thread."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@contextlib.contextmanager
def outside() -> Iterator[None]:
    """This thread, and what it starts, is back in the network of before until the block ends."""
    if not _outer:
        yield
        return
    with open("/proc/thread-self/ns/net") as ours:
        _enter(_outer[0])
        try:
            yield
        finally:
            _enter(ours.fileno())


def given() -> Path | None:
    """The kubeconfig of a cluster of the user's own."""
    named = os.environ.get("AENV_TEST_KUBECONFIG")
    if named and shutil.which("kubectl") is None:
        pytest.skip("not installed: kubectl")
    return Path(named) if named else None
