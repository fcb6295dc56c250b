"""Where a cluster is, and how one shows who asks: each way that a kubeconfig knows, against real API servers."""

from __future__ import annotations

import base64
import json
import os
import stat
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from aenv.engines.kubernetes import access
from aenv.engines.kubernetes.access import find
from aenv.engines.kubernetes.api import Cluster
from aenv.errors import InvalidConfig, NetworkError, Unauthorized
from tests.cluster.api import ApiServer

pytestmark = pytest.mark.xdist_group("kubernetes-api")

WHO = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
MAY = {"kind": "SelfSubjectAccessReview", "apiVersion": "authorization.k8s.io/v1"}
ANYTHING = {"spec": {"resourceAttributes": {"verb": "*", "resource": "*"}}}


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No cluster is known by itself."""
    for name in ("KUBECONFIG", "AENV_KUBECONFIG", "AENV_KUBE_CONTEXT", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def written(folder: Path, server: dict[str, Any], user: dict[str, Any] | None, **context: Any) -> Path:
    """A kubeconfig."""
    held = {
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "c", **({"user": "u"} if user else {}), **context}}],
        "clusters": [{"name": "c", "cluster": server}],
        "users": [{"name": "u", "user": user}] if user else [],
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(held))
    return path


def server_of(api_server: ApiServer) -> dict[str, Any]:
    return {"server": api_server.url, "certificate-authority": str(api_server.certificate)}


async def may_do_anything(kubeconfig: Path | str) -> bool:
    asked = await Cluster.find(str(kubeconfig))
    answer = await asked.ask("POST", WHO, body={**MAY, **ANYTHING})
    return bool(answer["status"]["allowed"])


def program(folder: Path, text: str) -> Path:
    path = folder / "gives-tokens"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# Ways to show who asks


async def test_a_token(api_server: ApiServer, tmp_path: Path) -> None:
    assert await may_do_anything(written(tmp_path, server_of(api_server), {"token": api_server.token}))


async def test_a_wrong_token_is_told_of(api_server: ApiServer, tmp_path: Path) -> None:
    with pytest.raises(Unauthorized, match="401") as caught:
        await may_do_anything(written(tmp_path, server_of(api_server), {"token": "wrong"}))
    assert "KUBECONFIG" in str(caught.value.hint)


async def test_a_certificate_in_the_file_itself(api_server: ApiServer) -> None:
    assert await may_do_anything(api_server.certified())


async def test_certificates_beside_the_file(api_server: ApiServer, tmp_path: Path) -> None:
    held = json.loads(api_server.certified().read_text())
    (cluster,), (user,) = held["clusters"], held["users"]
    for values, name in (
        (cluster["cluster"], "certificate-authority"),
        (user["user"], "client-certificate"),
        (user["user"], "client-key"),
    ):
        (tmp_path / f"{name}.pem").write_bytes(base64.b64decode(values.pop(f"{name}-data")))
        values[name] = f"{name}.pem"
    (tmp_path / "kubeconfig").write_text(json.dumps(held))
    assert await may_do_anything(tmp_path / "kubeconfig")


async def test_a_token_in_a_file_that_is_written_anew(
    api_server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("old\n")
    asked = await Cluster.find(str(written(tmp_path, server_of(api_server), {"tokenFile": "token"})))
    with pytest.raises(Unauthorized):
        await asked.ask("GET", "/api/v1/namespaces")
    (tmp_path / "token").write_text(f"{api_server.token}\n")
    monkeypatch.setattr(access, "_FRESH", 0.0)
    asked = await Cluster.find(str(tmp_path / "kubeconfig"))
    (tmp_path / "token").write_text("wrong\n")
    with pytest.raises(Unauthorized):
        await asked.ask("GET", "/api/v1/namespaces")
    (tmp_path / "token").write_text(f"{api_server.token}\n")
    assert await asked.ask("GET", "/api/v1/namespaces")


async def test_a_token_that_was_taken_back_is_read_again(api_server: ApiServer, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("expired\n")
    asked = await Cluster.find(str(written(tmp_path, server_of(api_server), {"tokenFile": "token"})))
    with pytest.raises(Unauthorized):
        await asked.ask("GET", "/api/v1/namespaces")
    (tmp_path / "token").write_text(api_server.token)
    assert await asked.ask("GET", "/api/v1/namespaces"), "the server refused the one before, so it is not used on"


async def test_a_program_that_gives_tokens(api_server: ApiServer, tmp_path: Path) -> None:
    source = """
import json, os, sys
with open(sys.argv[1], "a") as count:
    count.write("x")
asked = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
assert asked["kind"] == "ExecCredential" and not asked["spec"]["interactive"]
print(json.dumps({"status": {"token": os.environ["GIVEN"], "expirationTimestamp": sys.argv[2]}}))
"""
    later = (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    user = {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1beta1",
            "command": str(program(tmp_path, source)),
            "args": [str(tmp_path / "count"), later],
            "env": [{"name": "GIVEN", "value": api_server.token}],
        }
    }
    asked = await Cluster.find(str(written(tmp_path, server_of(api_server), user)))
    for _ in range(3):
        await asked.ask("GET", "/api/v1/namespaces")
    assert (tmp_path / "count").read_text() == "x", "it is asked once while its token lasts"


async def test_a_token_of_a_program_that_is_over_is_asked_for_again(api_server: ApiServer, tmp_path: Path) -> None:
    source = """
import json, os, sys
with open(sys.argv[1], "a") as count:
    count.write("x")
print(json.dumps({"status": {"token": os.environ["GIVEN"], "expirationTimestamp": "2001-01-01T00:00:00Z"}}))
"""
    given = [{"name": "GIVEN", "value": api_server.token}]
    user = {"exec": {"command": str(program(tmp_path, source)), "args": [str(tmp_path / "count")], "env": given}}
    asked = await Cluster.find(str(written(tmp_path, server_of(api_server), user)))
    for _ in range(2):
        await asked.ask("GET", "/api/v1/namespaces")
    assert (tmp_path / "count").read_text() == "xx"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import sys; sys.exit('log in first')", "log in first"),
        ("print('no json')", "gives-tokens"),
        ("print('{}')", "status"),
        ("print('[]')", "gives-tokens"),
        ("print('{\"status\": {}}')", "token"),
        ("print('{\"status\": null}')", "gives-tokens"),
    ],
)
async def test_a_program_that_gives_none_says_why(tmp_path: Path, source: str, words: str) -> None:
    user = {"exec": {"command": str(program(tmp_path, source))}}
    found = find(str(written(tmp_path, {"server": "http://127.0.0.1:1"}, user)))
    with pytest.raises(Unauthorized, match=words):
        await found.header()


async def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    found = find(str(written(tmp_path, {"server": "http://127.0.0.1:1"}, {"exec": {"command": "aenv-no-such"}})))
    with pytest.raises(Unauthorized, match="aenv-no-such"):
        await found.header()


async def test_a_program_that_says_nothing_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_PROGRAM", 5.0)
    user = {"exec": {"command": "sh", "args": ["-c", f"echo $$ > {tmp_path}/pid; exec sleep 600"]}}
    found = find(str(written(tmp_path, {"server": "http://127.0.0.1:1"}, user)))
    with pytest.raises(Unauthorized, match="it took more than 5 s"):
        await found.header()
    process = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    assert not process.exists() or process.read_text().rpartition(")")[2].split()[0] == "Z"


# Which server, and which namespace


async def test_a_server_that_nobody_vouches_for(api_server: ApiServer, tmp_path: Path) -> None:
    user = {"token": api_server.token}
    with pytest.raises(NetworkError, match="(?i)certificate"):
        await (await Cluster.find(str(written(tmp_path, {"server": api_server.url}, user)))).ask(
            "GET", "/version", timeout=10
        )
    careless = {"server": api_server.url, "insecure-skip-tls-verify": True}
    assert await may_do_anything(written(tmp_path, careless, user))


def test_the_context_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = {
        "current-context": "a",
        "contexts": [
            {"name": "a", "context": {"cluster": "a", "namespace": "in-a"}},
            {"name": "b", "context": {"cluster": "b"}},
        ],
        "clusters": [{"name": name, "cluster": {"server": f"http://{name}.example:80/"}} for name in ("a", "b")],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(held))
    path = str(tmp_path / "kubeconfig")
    assert (find(path).url, find(path).namespace) == ("http://a.example:80", "in-a")
    assert (find(path, "b").url, find(path, "b").namespace) == ("http://b.example:80", "")
    monkeypatch.setenv("AENV_KUBE_CONTEXT", "b")
    assert find(path).url == "http://b.example:80"
    with pytest.raises(InvalidConfig, match="no context 'c'") as caught:
        find(path, "c")
    assert caught.value.hint == "it has: a, b"


def test_which_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {}
    for name in ("home/.kube", "second", "ours"):
        (tmp_path / name).mkdir(parents=True)
        places[name] = written(tmp_path / name, {"server": f"http://{name.split('/')[0]}.example"}, None)
    places["home/.kube"].rename(tmp_path / "home/.kube/config")
    assert find().url == "http://home.example"
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join((str(tmp_path / "none"), str(places["second"]))))
    assert find().url == "http://second.example"
    monkeypatch.setenv("AENV_KUBECONFIG", str(places["ours"]))
    assert find().url == "http://ours.example"
    assert find(str(places["second"])).url == "http://second.example"


def test_no_file_at_all(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="no cluster is known") as caught:
        find()
    assert "KUBECONFIG" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("", "no context"),
        ("[]", "no context"),
        ("text", "is no kubeconfig"),
        ("contexts: 5\ncurrent-context: a", "is no kubeconfig"),
        ("contexts: [{name: a}]\ncurrent-context: a", "is no kubeconfig"),
        ("contexts: [{name: a, context: {cluster: c}}]\ncurrent-context: a", "no cluster 'c'"),
        (
            "contexts: [{name: a, context: {cluster: c}}]\ncurrent-context: a\nclusters: [{name: c, cluster: {}}]",
            "server",
        ),
        (
            "contexts: [{name: a, context: {cluster: c, user: u}}]\ncurrent-context: a\n"
            "clusters: [{name: c, cluster: {server: 'http://a'}}]",
            "no user 'u'",
        ),
        (
            "contexts: [{name: a, context: {cluster: c, user: u}}]\ncurrent-context: a\n"
            "clusters: [{name: c, cluster: {server: 'http://a'}}]\n"
            "users: [{name: u, user: {auth-provider: {name: gcp}}}]",
            "auth-provider",
        ),
        (
            "contexts: [{name: a, context: {cluster: c}}]\ncurrent-context: a\n"
            "clusters: [{name: c, cluster: {server: 'https://a', certificate-authority-data: '@@@'}}]",
            "certificate",
        ),
        (
            "contexts: [{name: a, context: {cluster: c}}]\ncurrent-context: a\n"
            "clusters: [{name: c, cluster: {server: 'https://a', certificate-authority: none.pem}}]",
            "certificate",
        ),
    ],
)
def test_files_with_missing_pieces_say_which(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "kubeconfig").write_text(text)
    with pytest.raises(InvalidConfig, match=words):
        find(str(tmp_path / "kubeconfig"))


# In a pod


@pytest.fixture
def account(api_server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a pod of that API server's cluster is given."""
    folder = tmp_path / "serviceaccount"
    folder.mkdir()
    (folder / "namespace").write_text("of-the-pod")
    (folder / "token").write_text(api_server.token)
    (folder / "ca.crt").write_bytes(api_server.certificate.read_bytes())
    monkeypatch.setattr(access, "ACCOUNT", folder)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api_server.port))
    return folder


async def test_the_account_of_a_pod(account: Path) -> None:
    asked = await Cluster.find()
    assert asked.namespace == "of-the-pod"
    assert (await asked.ask("GET", "/api/v1/namespaces"))["kind"] == "NamespaceList"


async def test_a_kubeconfig_that_is_set_comes_before_the_pod(account: Path, tmp_path: Path) -> None:
    path = written(tmp_path, {"server": "http://elsewhere.example"}, None)
    assert find(str(path)).url == "http://elsewhere.example"


def test_a_pod_without_an_account(account: Path) -> None:
    (account / "namespace").unlink()
    with pytest.raises(InvalidConfig, match="namespace cannot be read"):
        find()


def test_an_address_of_six(account: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert find().url == "https://[fd00::1]:443"


# Clocks


@pytest.mark.parametrize("text", ["", "yesterday", "99"])
def test_a_time_that_is_none(text: str) -> None:
    assert access.moment(text) == 0.0


def test_a_time() -> None:
    assert access.moment("2026-01-01T00:00:00Z") == access.moment("2026-01-01T01:00:00.000000+01:00") == 1767225600.0


async def test_the_clock_of_the_server_counts(api_server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = await Cluster.find(str(api_server.kubeconfig))
    await asked.ask("GET", "/version")
    true = time.time()
    assert asked.now() == pytest.approx(true, abs=30)
    for wrong in (-3600.0, 3600.0):
        real = time.time
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda real=real, wrong=wrong: real() + wrong)
            await asked.ask("GET", "/version")
            assert asked.now() == pytest.approx(real(), abs=30), "an hour off, and it still knows the time"
    await asked.ask("GET", "/version")
    assert asked.now() == pytest.approx(time.time(), abs=30)
