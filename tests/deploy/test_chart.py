"""The chart's objects: the same from us and from Helm, valid for every version of Kubernetes, and closed by default."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from aenv import __version__
from aenv.auth.tokens import TOKEN
from aenv.deploy import documents
from aenv.deploy.chart import Object, Release, chart
from aenv.errors import Invalid
from tests.deploy.support import EXTERNAL, SETS, by_helm, needs_helm, rendered, without_chance, write
from tests.docs.doc_pages import ROOT

VERSIONS = sorted(
    {
        int(match[1])
        for path in Path(kubernetes_validate.__file__).parent.joinpath("kubernetes-json-schema").iterdir()
        if (match := re.match(r"v1\.(\d+)\.", path.name)) and int(match[1]) >= 25
    }
)


@pytest.fixture(params=SETS)
def values(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SETS[request.param]


@needs_helm
@pytest.mark.parametrize("apis", [(), ("policy/v1", "autoscaling/v2")])
def test_helm_makes_the_same_objects(values: dict[str, Any], apis: tuple[str, ...], tmp_path: Path) -> None:
    options = [option for api in apis for option in ("--api-versions", api)]
    theirs = documents.load_all(by_helm(values, tmp_path, *options), "helm")
    ours = rendered(values, tmp_path).objects
    assert [(found["kind"], found["metadata"]["name"]) for found in theirs] == [
        (found.kind, found.name) for found in ours
    ]
    for their, our in zip(theirs, ours, strict=True):
        assert without_chance(our.content) == without_chance(documents.plain(their))


def test_every_version_of_kubernetes_accepts_them(values: dict[str, Any], tmp_path: Path) -> None:
    assert VERSIONS[0] == 25
    assert len(VERSIONS) >= 9
    # The full one has every kind of object; of the others, the oldest and the newest tell enough.
    for minor in VERSIONS if values == SETS["full"] else (VERSIONS[0], VERSIONS[-1]):
        for found in rendered(values, tmp_path, version=(1, minor)).objects:
            if found.kind != "ServiceMonitor":  # it is not of Kubernetes itself
                kubernetes_validate.validate(found.content, f"1.{minor}", strict=True)


@pytest.mark.parametrize(
    ("minor", "policy", "autoscaling"),
    [
        (20, "policy/v1beta1", "autoscaling/v2beta2"),
        (22, "policy/v1", "autoscaling/v2beta2"),
        (23, "policy/v1", "autoscaling/v2"),
    ],
)
def test_api_versions_are_what_the_server_offers(minor: int, policy: str, autoscaling: str, tmp_path: Path) -> None:
    objects = rendered(SETS["full"], tmp_path, version=(1, minor)).objects
    assert {found.content["apiVersion"] for found in objects if found.kind == "PodDisruptionBudget"} == {policy}
    [scaler] = [found.content for found in objects if found.kind == "HorizontalPodAutoscaler"]
    assert scaler["apiVersion"] == autoscaling
    [old] = [
        found.content
        for found in rendered(SETS["full"], tmp_path, apis=frozenset({"autoscaling/v1"})).objects
        if found.kind == "HorizontalPodAutoscaler"
    ]
    assert (old["apiVersion"], old["spec"]["targetCPUUtilizationPercentage"]) == ("autoscaling/v1", 70)


def _pods(objects: list[Object]) -> Iterator[tuple[str, dict[str, Any]]]:
    for found in objects:
        if found.kind in ("Deployment", "StatefulSet"):
            yield found.content["metadata"]["labels"]["app.kubernetes.io/component"], found.content["spec"]["template"]


def test_pods_are_as_pod_security_restricted_wants_them(values: dict[str, Any], tmp_path: Path) -> None:
    pods = list(_pods(rendered(values, tmp_path).objects))
    assert len(pods) >= 2
    for _, pod in pods:
        spec = pod["spec"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert all(set(volume) - {"name"} <= RESTRICTED for volume in spec["volumes"])
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["enableServiceLinks"] is False
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "runAsNonRoot": True,
                "capabilities": {"drop": ["ALL"]},
                "seccompProfile": {"type": "RuntimeDefault"},
            }
            assert container["resources"]
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)


RESTRICTED = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}


@pytest.mark.parametrize(("name", "trusted"), [("default", {"hub", "api"}), ("full", {"controller"})])
def test_only_who_makes_sandboxes_may_ask_the_cluster(name: str, trusted: set[str], tmp_path: Path) -> None:
    objects = rendered(SETS[name], tmp_path).objects
    assert {part for part, pod in _pods(objects) if pod["spec"]["automountServiceAccountToken"]} == trusted
    accounts = {part: pod["spec"]["serviceAccountName"] for part, pod in _pods(objects)}
    bound = {
        subject["name"]
        for found in objects
        if found.kind.endswith("RoleBinding")
        for subject in found.content["subjects"]
    }
    assert {part for part, account in accounts.items() if account in bound} == trusted


RIGHTS = {
    "pods": ["create", "get", "list", "watch", "patch", "delete"],
    "pods/log": ["get"],
    "persistentvolumeclaims": ["create", "get", "list", "patch", "delete"],
    "networkpolicies": ["create", "patch"],
    "leases": ["create", "get", "update"],
}
"""All that the engine asks of a cluster."""


def test_rights_are_few_and_in_the_namespace_of_sandboxes(values: dict[str, Any], tmp_path: Path) -> None:
    objects = rendered(values, tmp_path).objects
    rules = [rule for found in objects if found.kind == "Role" for rule in found.content["rules"]]
    given = {resource: rule["verbs"] for rule in rules for resource in rule["resources"]}
    assert given == (RIGHTS if values.get("rbac", {}).get("create", True) else {})
    roles = [found.content["metadata"]["namespace"] for found in objects if found.kind in ("Role", "RoleBinding")]
    assert set(roles) <= {values.get("sandboxes", {}).get("namespace", "aenv-sandboxes")}
    assert {found.kind for found in objects if "namespace" not in found.content["metadata"]} <= {"Namespace"}


def test_the_guide_lists_the_rights() -> None:
    page = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
    section = page.partition("## The account's rights")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", section, re.MULTILINE)
    assert {resource: verbs.split(", ") for resource, verbs in rows} == RIGHTS


def test_nothing_is_open_by_default(tmp_path: Path) -> None:
    objects = rendered({}, tmp_path).objects
    assert {found.content["spec"]["type"] for found in objects if found.kind == "Service"} == {"ClusterIP"}
    [redis] = [pod["spec"]["containers"][0] for part, pod in _pods(objects) if part == "redis"]
    assert redis["args"][:2] == ["--requirepass", "$(REDISCLI_AUTH)"]
    assert not [found for found in objects if found.kind == "Ingress"]
    [namespace] = [found.content["metadata"] for found in objects if found.kind == "Namespace"]
    assert namespace["labels"]["pod-security.kubernetes.io/enforce"] == "baseline"
    policies = {found.name: found.content["spec"] for found in objects if found.kind == "NetworkPolicy"}
    for closed in (policies["aenv-sandboxes"], policies["aenv-redis"]):
        assert "Egress" in closed["policyTypes"]
        assert "egress" not in closed
    assert policies["aenv-sandboxes"]["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "aenv-sandbox"}}
    assert all("from" in rule for rule in policies["aenv-redis"]["ingress"])


def test_a_server_has_the_time_to_stop_by_itself(values: dict[str, Any], tmp_path: Path) -> None:
    for part, pod in _pods(rendered(values, tmp_path).objects):
        if part == "redis":
            continue
        [container] = pod["spec"]["containers"]
        env = {row["name"]: row.get("value") for row in container["env"]}
        needed = int(env["AENV_DRAIN"]) + int(env["AENV_GRACE"])
        assert pod["spec"]["terminationGracePeriodSeconds"] > needed
        probe = container["livenessProbe"]
        assert probe["periodSeconds"] * (probe["failureThreshold"] - 1) > needed


def test_secrets_are_made_once(tmp_path: Path) -> None:
    first = rendered({}, tmp_path).objects
    held = {found.name: found.content for found in first if found.kind == "Secret"}
    asked = []

    def lookup(*what: str) -> dict[str, Any]:
        asked.append(what)
        return held[what[3]]

    found = chart()
    again = found.render(found.effective(), Release(), lookup).objects
    assert {one.name: one.content for one in again if one.kind == "Secret"} == held
    names = ("aenv-first-token", "aenv-hub-key", "aenv-redis")
    assert sorted(asked) == [("v1", "Secret", "aenv", name) for name in names]
    other = rendered({}, tmp_path).objects
    assert {one.name: one.content for one in other if one.kind == "Secret"} != held
    tokens = [base64.b64decode(held[name]["data"]["token"]).decode() for name in names[:2]]
    assert all(map(TOKEN.fullmatch, tokens))
    assert len(set(tokens)) == 2


def test_the_admin_of_controllers_is_not_that_of_the_platform(tmp_path: Path) -> None:
    opened, stores = {}, {}
    for part, pod in _pods(rendered({"controller": {"enabled": True}}, tmp_path).objects):
        env = {row["name"]: row for row in pod["spec"]["containers"][0]["env"]}
        if part != "redis":
            named = {name: env[name]["valueFrom"]["secretKeyRef"]["name"] for name in env if name in TOKENS}
            opened[part], stores[part] = named, env["AENV_STORE"]["value"][-2:]
    platform = {
        "AENV_FIRST_TOKEN": "aenv-first-token",
        "AENV_HUB_KEY": "aenv-hub-key",
        "AENV_CONTROLLER_KEY": "aenv-controller",
    }
    assert opened == {"hub": platform, "api": platform, "controller": {"AENV_FIRST_TOKEN": "aenv-controller"}}
    assert stores == {"hub": "/0", "api": "/0", "controller": "/1"}
    with pytest.raises(Invalid, match="controllers need a database of their own"):
        rendered({**EXTERNAL, "controller": {"enabled": True}}, tmp_path)


TOKENS = ("AENV_FIRST_TOKEN", "AENV_HUB_KEY", "AENV_CONTROLLER_KEY")


@pytest.mark.parametrize(("name", "secret"), [("full", "site-metrics"), ("external", "scraper")])
def test_every_server_takes_the_token_of_the_service_monitor(name: str, secret: str, tmp_path: Path) -> None:
    objects = rendered(SETS[name], tmp_path).objects
    [monitor] = [found.content["spec"] for found in objects if found.kind == "ServiceMonitor"]
    wanted = {"name": secret, "key": "token"}
    assert monitor["endpoints"][0]["authorization"]["credentials"] == wanted
    for part, pod in _pods(objects):
        given = [row for row in pod["spec"]["containers"][0]["env"] if row["name"] == "AENV_METRICS_TOKEN"]
        assert [row["valueFrom"]["secretKeyRef"] for row in given] == ([wanted] if part != "redis" else [])


def test_a_scraper_reaches_every_server(tmp_path: Path) -> None:
    objects = rendered(SETS["full"], tmp_path).objects
    policies = {found.name: found.content["spec"]["ingress"] for found in objects if found.kind == "NetworkPolicy"}
    scrapers = SETS["full"]["networkPolicy"]["scrapers"]
    rule = {"from": scrapers, "ports": [{"protocol": "TCP", "port": 8080}]}
    for name in ("site-controller", "site-servers"):
        assert rule in policies[name]
    assert rule not in policies["site-redis"]


def test_no_secret_is_shown_where_pods_are_described(tmp_path: Path) -> None:
    for values in SETS.values():
        objects = rendered(values, tmp_path).objects
        texts = [found.text for found in objects if found.kind != "Secret"]
        for found in objects:
            for value in found.content.get("data", {}).values() if found.kind == "Secret" else ():
                assert not [text for text in texts if base64.b64decode(value).decode() in text]


def test_pod_templates_are_what_the_engine_reads(tmp_path: Path) -> None:
    objects = rendered(SETS["full"], tmp_path).objects
    [files] = [found.content["data"] for found in objects if found.kind == "ConfigMap"]
    assert {name.removesuffix(".json"): json.loads(text) for name, text in files.items()} == SETS["full"][
        "podTemplates"
    ]
    for part, pod in _pods(objects):
        mounts = {row["mountPath"] for row in pod["spec"]["containers"][0]["volumeMounts"]}
        assert ("/etc/aenv/pod-templates" in mounts) is (part != "redis")


@pytest.mark.parametrize(("name", "told"), [("default", None), ("full", "nvidia.com/gpu,example.org/slot")])
def test_who_makes_sandboxes_knows_which_extended_resources_are_allowed(
    name: str, told: str | None, tmp_path: Path
) -> None:
    for part, pod in _pods(rendered(SETS[name], tmp_path).objects):
        if part in ("api", "controller"):
            variables = {row["name"]: row.get("value") for row in pod["spec"]["containers"][0]["env"]}
            assert variables.get("AENV_EXTENDED_RESOURCES") == told


def test_a_changed_pod_template_restarts_the_servers(tmp_path: Path) -> None:
    def marks(values: dict[str, Any]) -> set[str]:
        pods = _pods(rendered(values, tmp_path).objects)
        return {pod["metadata"]["annotations"]["aenv/pod-templates"] for part, pod in pods if part != "redis"}

    one, other = {"podTemplates": {"a": {"spec": {}}}}, {"podTemplates": {"b": {"spec": {}}}}
    assert marks(one) == marks(one) != marks(other)


@pytest.mark.parametrize(
    ("wrong", "message", "hint"),
    [
        ({"api": {"replica": 3}}, "there is no value values.api.replica", "did you mean 'replicas'?"),
        ({"redsi": {}}, "there is no value values.redsi", "did you mean 'redis'?"),
        ({"api": {"replicas": "three"}}, "values.api.replicas is 'three', and must be integer", "How many"),
        ({"api": {"replicas": -1}}, "values.api.replicas is -1, which is too small", ""),
        ({"logFormat": "xml"}, "values.logFormat is 'xml'", "'json', 'text'"),
        ({"api": {"dataUrl": "data.example.org"}}, "values.api.dataUrl is 'data.example.org', which does not", ""),
        ({"podTemplates": {"x": {"nodeSelector": {}}}}, "there is no value values.podTemplates.x.nodeSelector", ""),
        ({"imagePullSecrets": [{"name": "x"}]}, "values.imagePullSecrets[0] is an object", ""),
        ({"sandboxes": {"extendedResources": ["gpu"]}}, "values.sandboxes.extendedResources[0] is 'gpu'", ""),
        ({"sandboxes": {"extendedResources": ["a/b,c/d"]}}, "extendedResources[0] is 'a/b,c/d', which does not", ""),
        ({"hub": []}, "values.hub is a list, and must be object", ""),
    ],
)
def test_values_that_are_none_are_refused(wrong: dict[str, Any], message: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(Invalid) as caught:
        rendered(wrong, tmp_path)
    assert message in caught.value.message
    assert hint in (caught.value.hint or "")
    # A full implementation of JSON Schema agrees, here and below.
    with pytest.raises(jsonschema.ValidationError):
        _check(wrong)


def _check(values: dict[str, Any]) -> None:
    schema = json.loads((chart().directory / "values.schema.json").read_bytes())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(documents.plain(values), schema)


def test_good_values_are_accepted(values: dict[str, Any], tmp_path: Path) -> None:
    _check(chart().effective([write(values, tmp_path)]))


def test_the_schema_describes_every_value() -> None:
    def described(values: dict[str, Any], schema: dict[str, Any], where: str) -> None:
        for name, value in values.items():
            found = schema["properties"][name]
            if "properties" in found:
                assert found["additionalProperties"] is False, where + name
                described(value, found, f"{where}{name}.")
            else:
                assert found.get("description"), where + name

    schema = json.loads((chart().directory / "values.schema.json").read_bytes())
    described(chart().values, schema, "")


def test_the_comments_say_what_the_schema_says() -> None:
    where: list[str] = []
    comment: list[str] = []
    schema, seen = chart().schema, 0
    for line in (chart().directory / "values.yaml").read_text().splitlines():
        if line.strip().startswith("#"):
            comment.append(line.strip().removeprefix("#").strip())
        elif found := re.match(r"( *)([A-Za-z]+):", line):
            where[len(found[1]) // 2 :] = [found[2]]
            described = schema
            for name in where:
                described = described.get("properties", {}).get(name, {})
            if comment and described:
                assert described["description"] == " ".join(comment), where
                seen += 1
            comment = []
        else:
            comment = []
    assert seen > 80


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hub": {"replicas": 2}}, "several hubs need their packages in a bucket"),
        ({"redis": {"enabled": False}}, "name your own with redis.external"),
        ({"serviceMonitor": {"enabled": True}, "controller": {"enabled": True}}, "closed to Prometheus"),
        ({"ingress": {"enabled": True}}, "name at least ingress.apiHost"),
    ],
)
def test_values_that_do_not_go_together_are_refused(wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=message):
        rendered(wrong, tmp_path)


def test_the_chart_is_of_this_version() -> None:
    assert chart().about["version"] == chart().about["appVersion"] == __version__


@pytest.mark.parametrize("name", ["", "Upper", "a" * 54, "-a", "a b"])
def test_a_release_has_a_name_that_objects_can_have(name: str, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="is not a release's name"):
        rendered({}, tmp_path, name=name)
