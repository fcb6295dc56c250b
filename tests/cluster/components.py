"""How each program of Kubernetes is started: its command line, and the files that it reads."""

from __future__ import annotations

import json
import subprocess
import sys
from base64 import b64encode
from pathlib import Path

from tests.cluster import material
from tests.daemons import REGISTRY

NODE, NODE_ADDRESS = "node1", "10.99.0.1"
PODS, SERVICES = "10.244.0.0/24", "10.96.0.0/16"
TOKEN = "admintoken"
VOLUMES = "/tmp/hostpath_pv"
"""Where the controllers make directories that are volumes: it cannot be told to them."""
_NAMES = (
    *("IP:127.0.0.1", f"IP:{NODE_ADDRESS}", "IP:10.96.0.1", "DNS:localhost"),
    *("DNS:kubernetes", "DNS:kubernetes.default", "DNS:kubernetes.default.svc"),
)
_CONTAINERD = """\
version = 2
root = "{home}/root"
state = "{home}/state"
[grpc]
  address = "{home}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true  # root may lack CAP_SYS_RESOURCE, and cannot lower it then
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{home}"
  [plugins."io.containerd.grpc.v1.cri".registry.mirrors."{registry}"]
    endpoint = ["http://{registry}"]
"""
_KUBELET = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
    "authorization": {"mode": "AlwaysAllow"},
    "cgroupDriver": "cgroupfs",
    "enforceNodeAllocatable": [],
    "failSwapOn": False,
    "clusterDomain": "cluster.local",
    "resolvConf": "",
    "oomScoreAdj": 0,
    "nodeStatusUpdateFrequency": "1s",
    "kubeAPIQPS": 100,
    "kubeAPIBurst": 200,
    "eventRecordQPS": 0,
    "serializeImagePulls": False,
    "maxPods": 200,
    # A disk that is nearly full is not the tests' to tidy: images that were brought cannot be pulled again.
    "evictionHard": {"memory.available": "100Mi"},
    "imageGCHighThresholdPercent": 100,
}


def certify(folder: Path) -> None:
    """Make the key of the API server, with which it also signs the tokens of service accounts, and its certificate."""
    if (folder / "tls.crt").exists():
        return
    (folder / "tokens.csv").write_text(f'{TOKEN},admin,admin,"system:masters"\n')
    names, usage = (
        f"subjectAltName={','.join(_NAMES)}",
        "keyUsage=critical,keyCertSign,digitalSignature,keyEncipherment",
    )
    _certificate(folder / "tls", "/CN=aenv-test", "-addext", names, "-addext", usage)


def _certificate(path: Path, subject: str, *options: str) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", subject, *options]
    files = ["-keyout", f"{path}.key", "-out", f"{path}.crt"]
    subprocess.run([*command, *files], capture_output=True, timeout=60, check=True)


def kubeconfig(folder: Path, port: int) -> Path:
    """Who the administrator is, by a token, and where the API server."""
    server = {"server": f"https://127.0.0.1:{port}", "certificate-authority": str(folder / "tls.crt")}
    return _kubeconfig(folder / "kubeconfig", server, {"token": TOKEN})


def certified(folder: Path, port: int) -> Path:
    """The same, by a certificate, with everything in the file itself."""
    _certificate(
        folder / "admin", "/O=system:masters/CN=admin", "-CA", f"{folder}/tls.crt", "-CAkey", f"{folder}/tls.key"
    )
    data = {name: b64encode((folder / name).read_bytes()).decode() for name in ("tls.crt", "admin.crt", "admin.key")}
    server = {"server": f"https://127.0.0.1:{port}", "certificate-authority-data": data["tls.crt"]}
    user = {"client-certificate-data": data["admin.crt"], "client-key-data": data["admin.key"]}
    return _kubeconfig(folder / "kubeconfig-certified", server, user)


def _kubeconfig(path: Path, server: dict[str, str], user: dict[str, str]) -> Path:
    held = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
        "clusters": [{"name": "test", "cluster": server}],
        "users": [{"name": "admin", "user": user}],
    }
    path.write_text(json.dumps(held))
    return path


def etcd(folder: Path, port: int, peers: int) -> list[str]:
    url = f"http://127.0.0.1:{port}"
    peer = f"http://127.0.0.1:{peers}"
    return [
        *("etcd", "--data-dir", str(folder / "etcd-data"), "--unsafe-no-fsync"),
        *("--listen-client-urls", url, "--advertise-client-urls", url),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
        *("--initial-cluster", f"default={peer}"),
    ]


def apiserver(folder: Path, port: int, etcd: int, *options: str) -> list[str]:
    key = str(folder / "tls.key")
    return [
        str(material.programs() / "kube-apiserver"),
        f"--etcd-servers=http://127.0.0.1:{etcd}",
        f"--secure-port={port}",
        f"--tls-cert-file={folder / 'tls.crt'}",
        f"--tls-private-key-file={key}",
        f"--token-auth-file={folder / 'tokens.csv'}",
        f"--client-ca-file={folder / 'tls.crt'}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-signing-key-file={key}",
        f"--service-account-key-file={key}",
        f"--service-cluster-ip-range={SERVICES}",
        "--authorization-mode=RBAC",
        "--allow-privileged=true",
        *options,
    ]


def controllers(folder: Path) -> list[str]:
    return [
        str(material.programs() / "kube-controller-manager"),
        f"--kubeconfig={folder / 'kubeconfig'}",
        "--leader-elect=false",
        f"--service-account-private-key-file={folder / 'tls.key'}",
        f"--root-ca-file={folder / 'tls.crt'}",
        "--enable-hostpath-provisioner=true",
        f"--cert-dir={folder / 'certs-controllers'}",
        "--use-service-account-credentials=true",
    ]


def storage() -> list[str]:
    """Opens the directories that are volumes to all users, as the storage of a real cluster gives them to a pod's
    group: what makes them here does not."""
    lines = (
        "import os, time",
        "while not time.sleep(0.1):",
        f"    for one in os.scandir({VOLUMES!r}):",
        "        os.chmod(one, 0o777)",
    )
    return [sys.executable, "-c", "\n".join(lines)]


def scheduler(folder: Path) -> list[str]:
    config, certs = folder / "kubeconfig", folder / "certs-scheduler"
    program = str(material.programs() / "kube-scheduler")
    return [program, f"--kubeconfig={config}", "--leader-elect=false", f"--cert-dir={certs}"]


def containerd(folder: Path) -> tuple[list[str], dict[str, str]]:
    home = folder / "containerd"
    ranges = [[{"subnet": PODS}]]
    ipam = {"type": "host-local", "dataDir": f"{home}/ipam", "ranges": ranges, "routes": [{"dst": "0.0.0.0/0"}]}
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "ipMasq": True, "hairpinMode": True, "ipam": ipam}
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    network = {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, ports]}
    return ["containerd", "--config", f"{home}/config.toml"], {
        "config.toml": _CONTAINERD.format(home=home, pause=material.PAUSE, registry=REGISTRY),
        "10-pods.conflist": json.dumps(network),
    }


def kubelet(folder: Path, group: str) -> tuple[list[str], dict[str, str]]:
    home = folder / "kubelet"
    return [
        str(material.programs() / "kubelet"),
        f"--config={home}/config.json",
        f"--kubeconfig={folder / 'kubeconfig'}",
        "--container-runtime=remote",
        f"--container-runtime-endpoint=unix://{folder}/containerd/containerd.sock",
        f"--root-dir={home}/root",
        f"--cert-dir={home}/certs",
        f"--volume-plugin-dir={home}/plugins",
        f"--hostname-override={NODE}",
        f"--node-ip={NODE_ADDRESS}",
    ], {"config.json": json.dumps({**_KUBELET, "cgroupRoot": f"/{group}"})}


def proxy(folder: Path) -> list[str]:
    return [
        str(material.programs() / "kube-proxy"),
        f"--kubeconfig={folder / 'kubeconfig'}",
        f"--hostname-override={NODE}",
        "--proxy-mode=iptables",
        "--conntrack-max-per-core=0",
        "--oom-score-adj=0",
    ]
