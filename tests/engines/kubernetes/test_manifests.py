"""What a cluster is asked for: pods that can do little, and say nothing that is nobody's business."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.engines.kubernetes import manifests
from aenv.engines.kubernetes.engine import KubernetesEngine
from aenv.engines.kubernetes.manifests import BESIDE, MAIN, PORTER, Site
from aenv.errors import Invalid, NotFound, Unsupported
from aenv.models import EnvRef, SandboxSpec, Second, Volume
from aenv.runtime.warm import INTERPRETER

SITE = Site(namespace="places", state="tests", base_image="aenv-base", longest=3600.0)
LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
DNS = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
VOLUMES = [Volume(name="notes", mount="/home/notes", size=1024**3, owner="ann")]
ALL = {
    "alone": {},
    "of an image": {"image": "registry.example/env:1"},
    "with a second container": {"second": Second(image="busybox:1")},
    "with a volume": {"volumes": VOLUMES},
    "warm": {"warm": True},
    "lasting": {"lasting": True},
}


def spec(**fields: Any) -> SandboxSpec:
    return SandboxSpec(**{"env": EnvRef("probe", "1.0.0"), "project": "/srv/probe", "ttl": 60.0, **fields})


def pod(site: Site = SITE, **fields: Any) -> dict[str, Any]:
    wanted = spec(**fields)
    return manifests.pod(wanted, manifests.facts("one", wanted, 1000.0), site, "0" * 64)


def containers(made: dict[str, Any]) -> dict[str, dict[str, Any]]:
    body = made["spec"]
    return {one["name"]: one for one in [*body.get("initContainers", ()), *body["containers"]]}


# What it may


@pytest.mark.parametrize("fields", ALL.values(), ids=ALL)
def test_a_pod_can_do_little(fields: dict[str, Any]) -> None:
    body = pod(**fields)["spec"]
    assert body["automountServiceAccountToken"] is False
    assert body["enableServiceLinks"] is False
    assert body["restartPolicy"] == "Never"
    assert body["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC", "serviceAccountName", "hostUsers"} & set(body)
    for volume in body["volumes"]:
        (kind,) = set(volume) - {"name"}
        assert kind in ("emptyDir", "persistentVolumeClaim")
        assert kind != "emptyDir" or volume["emptyDir"]["sizeLimit"]
    assert {mount["name"] for one in containers({"spec": body}).values() for mount in one["volumeMounts"]} == {
        volume["name"] for volume in body["volumes"]
    }


@pytest.mark.parametrize("fields", ALL.values(), ids=ALL)
def test_its_containers_can_do_little(fields: dict[str, Any]) -> None:
    for name, one in containers(pod(**fields)).items():
        may = one["securityContext"]
        assert may["allowPrivilegeEscalation"] is False
        assert may["capabilities"]["drop"] == ["ALL"]
        assert not may.get("privileged")
        assert one["resources"]["limits"].keys() >= {"cpu", "memory", "ephemeral-storage"}
        assert not any("hostPort" in port for port in one.get("ports", ()))
        if name == BESIDE:  # any image, of which some need root; but a root who may not do much
            assert set(may["capabilities"]["add"]) == set(manifests.CAPABILITIES)
            assert not {"SYS_ADMIN", "NET_ADMIN", "NET_RAW", "SYS_PTRACE", "MKNOD"} & set(may["capabilities"]["add"])
        else:
            assert (may["runAsNonRoot"], may["readOnlyRootFilesystem"]) == (True, True)
            assert may["runAsUser"] > 0
            assert "add" not in may["capabilities"]


def test_the_second_container_writes_where_the_main_one_only_reads() -> None:
    found = containers(pod(second=Second(image="busybox:1")))
    mounts = {name: {one["mountPath"]: one for one in each["volumeMounts"]} for name, each in found.items()}
    assert mounts[MAIN][manifests.LINK]["readOnly"]
    assert mounts[BESIDE][manifests.AGENT]["readOnly"]
    assert manifests.WORK not in mounts[BESIDE]
    assert set(mounts[PORTER]) == {manifests.AGENT}
    assert found[BESIDE]["image"] == "busybox:1"


# What it says


@given(
    st.dictionaries(st.text(min_size=1, max_size=20), st.text(min_size=8, max_size=50), min_size=1, max_size=5),
    st.booleans(),
)
def test_no_value_of_a_variable_is_in_a_pod(variables: dict[str, str], hidden: bool) -> None:
    marked = {f"V_{name}": f"worth {value} <<here>>" for name, value in variables.items()}
    made = pod(environment_variables=marked, secrets=list(marked) if hidden else [], arguments=["a <<here>> argument"])
    assert "<<here>>" not in json.dumps(made, ensure_ascii=False)


def test_what_an_interpreter_reads_first_is_in_it_unless_it_is_a_secret() -> None:
    name = next(name for name in INTERPRETER if not name.endswith("*"))
    shown = containers(pod(environment_variables={name: "0"}))[MAIN]["env"]
    assert {"name": name, "value": "0"} in shown
    hidden = containers(pod(environment_variables={name: "0"}, secrets=[name]))[MAIN]["env"]
    assert name not in {one["name"] for one in hidden}


def test_a_dollar_is_a_dollar() -> None:
    name = next(name for name in INTERPRETER if not name.endswith("*"))
    made = pod(environment_variables={name: "$(HOME) costs $5 $$"})
    (row,) = (one for one in containers(made)[MAIN]["env"] if one["name"] == name)
    assert row["value"] == "$$(HOME) costs $$5 $$$$"  # a node makes one of two


def test_the_digest_of_tokens_and_no_token() -> None:
    env = {one["name"]: one["value"] for one in containers(pod(owner_token_sha256="f" * 64))[MAIN]["env"]}
    assert (env["AENV_OWNER_TOKEN_SHA256"], env["AENV_ENGINE_TOKEN_SHA256"]) == ("f" * 64, "0" * 64)
    assert not {"AENV_OWNER_TOKEN", "AENV_ENGINE_TOKEN"} & set(env)


# What is brought instead


def test_what_is_brought() -> None:
    wanted = spec(
        environment_variables={"A": "1"}, secrets=["A"], arguments=["x"], seed=7, idle=30.0, warm=True, volumes=VOLUMES
    )
    found = manifests.brought(wanted)
    assert found.variables["A"] == "1"
    assert found.variables["AENV_SECRETS"] == "A"
    assert found.variables["AENV_SEED"] == "7"
    assert found.variables["AENV_IDLE"] == "30"
    assert found.variables["AENV_PRELOAD"] == "false"  # the import may look into a volume
    assert (found.arguments, found.project) == (["x"], True)
    assert not manifests.brought(spec(image="i:1")).project
    assert manifests.brought(spec(idle=30.0, lasting=True)).variables["AENV_IDLE"] == ""


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("A=B", "x", "cannot be a variable"),
        ("", "x", "cannot be a variable"),
        ("A", "a\0b", "cannot be a variable"),
        ("A", "\ud800", "cannot be a variable"),
        ("A", "x" * manifests.LONGEST_VARIABLE, "no variable of more than"),
    ],
)
def test_variables_that_no_process_can_have(name: str, value: str, words: str) -> None:
    with pytest.raises(Invalid, match=words):
        manifests.brought(spec(environment_variables={name: value}))


def test_more_variables_than_a_process_can_have() -> None:
    many = {f"V{number}": "x" * 100_000 for number in range(20)}
    with pytest.raises(Invalid, match="together"):
        manifests.brought(spec(environment_variables=many))


# Names and labels


@given(
    st.text(max_size=300),
    st.dictionaries(st.text(max_size=100), st.text(max_size=100), max_size=5),
    st.text(min_size=1, max_size=80),
)
def test_labels_are_fit_whatever_users_give(owner: str, labels: dict[str, str], name: str) -> None:
    made = pod(owner=owner, labels=labels, env=EnvRef(name))
    for key, value in made["metadata"]["labels"].items():
        prefix, _, tail = key.rpartition("/")
        assert LABEL.fullmatch(value), (key, value)
        assert LABEL.fullmatch(tail or "-")
        assert len(prefix) <= 253
    assert all(isinstance(value, str) for value in made["metadata"]["annotations"].values())
    json.dumps(made).encode()


@pytest.mark.parametrize(
    "key", ["a..b/c", "-a", "a-", "a b", "/b", "a/", "a/b/c", "sidecar.example.org/inject", "", "b" * 64]
)
def test_keys_that_no_label_can_have_and_those_of_others_are_in_the_annotation_alone(key: str) -> None:
    made = pod(labels={key: "v", "team.example-1": "us"})
    assert key not in made["metadata"]["labels"]
    assert made["metadata"]["labels"]["team.example-1"] == "us"
    assert json.loads(made["metadata"]["annotations"][manifests.FACTS])["labels"][key] == "v"


@pytest.mark.parametrize("key", [manifests.STATE, manifests.NETWORK, manifests.APP, "aenv/owner", manifests.WARM])
def test_our_own_labels_are_nobody_elses(key: str) -> None:
    assert pod(labels={key: "mine"})["metadata"]["labels"].get(key) != "mine"


@given(st.text(max_size=100), st.text(max_size=100))
def test_owners_that_differ_have_claims_that_differ(one: str, other: str) -> None:
    names = {manifests.claim_name("tests", owner, "notes") for owner in (one, other)}
    assert len(names) == len({one, other})


@given(st.text(max_size=300), st.text(max_size=300), st.text(max_size=80))
def test_the_name_of_a_claim_is_fit(owner: str, name: str, state: str) -> None:
    assert DNS.fullmatch(manifests.claim_name(state, owner, name))


@given(st.text(max_size=100), st.text(max_size=100))
def test_a_claim_knows_whose_it_is(owner: str, name: str) -> None:
    made = manifests.claim(Volume(name=name, mount="/home/a", size=5, owner=owner), SITE)
    assert manifests.claimed(made) == (owner, name)
    assert all(LABEL.fullmatch(value) for value in made["metadata"]["labels"].values())
    assert made["spec"]["accessModes"] == ["ReadWriteOnce"]


@pytest.mark.parametrize("found", [{}, {"metadata": {}}, {"metadata": {"annotations": {manifests.FACTS: "{"}}}])
def test_a_claim_of_somebody_else(found: dict[str, Any]) -> None:
    assert manifests.claimed(found) is None


@pytest.mark.parametrize("id", ["", "A", "-a", "a-", "a_b", "a.b", "a" * 64, "ä", "a\n", "../x", "a/b"])
def test_ids_that_no_pod_can_have(id: str) -> None:
    with pytest.raises(Invalid, match="cannot be a pod's name"):
        manifests.check(id, spec())


@pytest.mark.parametrize("id", ["a", "0", "a-b", "a" * 63])
def test_ids_that_a_pod_can_have(id: str) -> None:
    manifests.check(id, spec())


# What it gets


def test_resources_are_sure_and_no_more() -> None:
    made = containers(pod(resources={"cpu": "0.5", "memory": "1Gi", "ephemeralStorage": "2Gi"}))[MAIN]["resources"]
    assert made["limits"] == {"cpu": "500m", "memory": str(1024**3), "ephemeral-storage": str(2 * 1024**3)}
    assert made["requests"] == made["limits"]


def test_what_a_sandbox_has_one_of_goes_to_the_container_of_the_task() -> None:
    given = {"nvidia.com/gpu": "2", "memory": "1Gi"}
    found = containers(pod(resources=given, second=Second(image="busybox:1")))
    assert found[BESIDE]["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert "nvidia.com/gpu" not in found[MAIN]["resources"]["limits"]
    assert "nvidia.com/gpu" not in found[PORTER]["resources"]["limits"]
    shares = [int(found[name]["resources"]["limits"]["memory"]) for name in (MAIN, BESIDE)]
    assert sum(shares) == 1024**3


@pytest.mark.parametrize(
    ("name", "value"),
    [("gpu", "1"), ("nvidia.com/gpu", "half"), ("nvidia.com/gpu", "-1"), ("a b/c", "1"), ("x/", "1"), ("memry", "1Gi")],
)
def test_resources_that_no_node_has(name: str, value: str) -> None:
    with pytest.raises(Invalid, match="nothing that a node could give"):
        manifests.check_resources({name: value}, ["nvidia.com/gpu"])


@pytest.mark.parametrize("name", ["devices.kubevirt.io/kvm", "nvidia.com/gpu2", "nvidia.com/GPU", "com/gpu"])
async def test_what_the_operator_does_not_allow_is_refused(name: str) -> None:
    engine = KubernetesEngine(extended=["nvidia.com/gpu"])
    for ask in (engine.check_resources, lambda wanted: manifests.check_resources(wanted, ())):
        ask({"cpu": "1", "memory": "1Gi", "ephemeralStorage": "1Gi"})
        with pytest.raises(Invalid, match=f"'{name}' may not be asked for here") as caught:
            ask({"cpu": "1", name: "1"})
        assert "the operator allows more with AENV_EXTENDED_RESOURCES" in (caught.value.hint or "")
    with pytest.raises(Invalid, match="may not be asked for here") as caught:
        await engine.create("one", spec(resources={name: "1"}))
    assert "use cpu, memory, ephemeralStorage, nvidia.com/gpu;" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("variable", "argument", "allowed"),
    [
        ("", None, []),
        ("a.org/x, b.org/y,", None, ["a.org/x", "b.org/y"]),
        ("a.org/x", ["b.org/y"], ["b.org/y"]),
        ("a.org/x", [], []),
    ],
)
def test_the_operator_allows_resources(
    variable: str, argument: list[str] | None, allowed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AENV_EXTENDED_RESOURCES", variable)
    engine = KubernetesEngine(extended=argument)
    for name in ("a.org/x", "b.org/y"):
        with nullcontext() if name in allowed else pytest.raises(Invalid, match=name):
            engine.check_resources({name: "1"})


@pytest.mark.parametrize("name", ["gpu", "cpu", "a b/c", "*/*", "x/"])
def test_what_no_node_has_cannot_be_allowed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENV_EXTENDED_RESOURCES", f"nvidia.com/gpu,{name}")
    with pytest.raises(Invalid, match=f"'{re.escape(name)}' in AENV_EXTENDED_RESOURCES is no extended resource"):
        KubernetesEngine()


def test_only_what_lasts_has_no_deadline() -> None:
    assert pod()["spec"]["activeDeadlineSeconds"] == 3600
    assert "activeDeadlineSeconds" not in pod(lasting=True)["spec"]
    assert manifests.EXPIRES not in pod(lasting=True)["metadata"]["annotations"]
    assert float(pod()["metadata"]["annotations"][manifests.EXPIRES]) == 1060.0


def test_a_node_waits_at_least_as_long_as_its_caller() -> None:
    probe = containers(pod(startup_timeout=123.0))[MAIN]["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] > 123


def test_only_without_an_image_it_is_told_what_to_run() -> None:
    assert "command" not in containers(pod(image="i:1"))[MAIN]
    assert containers(pod(image="i:1"))[MAIN]["image"] == "i:1"
    assert containers(pod())[MAIN]["image"] == "aenv-base"
    assert containers(pod())[MAIN]["command"][:3] == ["python", "-m", "aenv.runtime"]


@pytest.mark.parametrize("mount", ["/", "/work", "/tmp/../work", "/aenv", "/etc/x", "/shared", "/usr", "/proc/1"])
def test_places_where_no_volume_can_be(mount: str) -> None:
    with pytest.raises(Invalid, match="cannot be at"):
        manifests.check("one", spec(volumes=[Volume(name="a", mount=mount, size=1, owner="")]))


def test_a_volume_is_where_it_was_asked_for() -> None:
    made = pod(volumes=VOLUMES)
    claim = manifests.claim_name("tests", "ann", "notes")
    assert {"name": "volume-0", "persistentVolumeClaim": {"claimName": claim}} in made["spec"]["volumes"]
    assert {"name": "volume-0", "mountPath": "/home/notes"} in containers(made)[MAIN]["volumeMounts"]


def test_a_path_of_this_machine_is_refused() -> None:
    with pytest.raises(Unsupported, match="/srv/data"):
        manifests.check("one", spec(datasource="/srv/data"))


# Networks


def test_a_network_that_nothing_leaves() -> None:
    made = manifests.network_policy("none", SITE)
    assert made is not None
    assert (made["spec"]["policyTypes"], made["spec"]["egress"]) == (["Egress"], [])
    selected = made["spec"]["podSelector"]["matchLabels"]
    assert selected.items() <= pod(network="none")["metadata"]["labels"].items()
    for other in (None, "full", {"allow": ["10.0.0.7:443"]}):
        assert not selected.items() <= pod(network=other)["metadata"]["labels"].items()


@pytest.mark.parametrize("wanted", [None, "full"])
def test_a_network_that_all_may_leave(wanted: object) -> None:
    """Also where a namespace is closed; but not to where clouds give away the credentials of a node."""
    made = manifests.network_policy(wanted, SITE)
    blocks = [one["ipBlock"] for rule in made["spec"]["egress"] for one in rule["to"]]
    assert [block["cidr"] for block in blocks] == ["0.0.0.0/0", "::/0"]
    assert "169.254.0.0/16" in blocks[0]["except"]


def test_addresses_that_may_be_reached() -> None:
    made = manifests.network_policy({"allow": ["10.0.0.7:443", "10.1.0.0/16:80", "[2001:db8::1]:443"]}, SITE)
    assert made is not None
    found = {(rule["to"][0]["ipBlock"]["cidr"], rule["ports"][0]["port"]) for rule in made["spec"]["egress"]}
    assert found == {("10.0.0.7/32", 443), ("10.1.0.0/16", 80), ("2001:db8::1/128", 443)}
    assert LABEL.fullmatch(made["spec"]["podSelector"]["matchLabels"][manifests.NETWORK])
    assert DNS.fullmatch(made["metadata"]["name"])


def test_the_order_of_addresses_makes_no_other_network() -> None:
    one, other = ({"allow": list(order)} for order in (("10.0.0.1:1", "10.0.0.2:2"), ("10.0.0.2:2", "10.0.0.1:1")))
    assert manifests.network_name(one) == manifests.network_name(other)
    assert manifests.network_name(one) != manifests.network_name({"allow": ["10.0.0.1:1"]})


@pytest.mark.parametrize("entry", ["pypi.org:443", "10.0.0.7", "10.0.0.7:https", "", "10.0.0.999:1"])
def test_names_are_no_addresses(entry: str) -> None:
    with pytest.raises(Unsupported, match="by address"):
        manifests.check("one", spec(network={"allow": [entry]}))


@pytest.mark.parametrize("entry", ["10.0.0.7:0", "10.0.0.7:65536", "10.0.0.7:-1"])
def test_ports_that_there_are_none_of(entry: str) -> None:
    with pytest.raises(Unsupported, match="by address"):
        manifests.check("one", spec(network={"allow": [entry]}))


@pytest.mark.parametrize("wanted", ["some", {"deny": []}, {"allow": [], "deny": []}])
def test_networks_that_there_are_none_of(wanted: Any) -> None:
    with pytest.raises(Invalid, match="is not a network"):
        manifests.check("one", spec(network=wanted))


# Templates


def test_a_template_is_laid_over_the_pod() -> None:
    over = {"default": {"spec": {"nodeSelector": {"a": "b"}}}, "big": {"spec": {"priorityClassName": "high"}}}
    site = Site(namespace="places", state="tests", base_image="aenv-base", longest=3600.0, templates=over)
    body = pod(site, template="Big")["spec"]
    assert (body["nodeSelector"], body["priorityClassName"]) == ({"a": "b"}, "high")
    assert body["automountServiceAccountToken"] is False
    with pytest.raises(NotFound, match="bgi"):
        pod(site, template="bgi")
