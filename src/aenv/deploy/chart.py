"""The chart that comes with the package, and the objects that values make of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct

from aenv.deploy import documents, schema, values
from aenv.deploy.rendering import Renderer
from aenv.errors import Invalid

CURRENT = (1, 33)
"""The version of Kubernetes that is taken for granted where no cluster is asked."""
MANAGER = "aenv"
"""Who looks after objects, by their label and in their managed fields."""
_NOTES = "NOTES.txt"
_RELEASE = re.compile(r"[a-z0-9]([-a-z0-9]{0,51}[a-z0-9])?")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_VERSIONS: dict[str, tuple[int, int]] = {
    "v1": (0, 99),
    "apps/v1": (9, 99),
    "autoscaling/v1": (0, 99),
    "autoscaling/v2": (23, 99),
    "autoscaling/v2beta2": (12, 25),
    "coordination.k8s.io/v1": (14, 99),
    "networking.k8s.io/v1": (19, 99),
    "networking.k8s.io/v1beta1": (14, 21),
    "policy/v1": (21, 99),
    "policy/v1beta1": (0, 24),
    "rbac.authorization.k8s.io/v1": (8, 99),
}
"""With which minor version of Kubernetes an API came, and the last one that has it."""
ORDER = (
    "Namespace",
    "NetworkPolicy",
    "ResourceQuota",
    "LimitRange",
    "PodDisruptionBudget",
    "ServiceAccount",
    "Secret",
    "ConfigMap",
    "PersistentVolumeClaim",
    "ClusterRole",
    "ClusterRoleBinding",
    "Role",
    "RoleBinding",
    "Service",
    "Deployment",
    "HorizontalPodAutoscaler",
    "StatefulSet",
    "Ingress",
)
"""Helm's order of installation."""


class Release(Struct, frozen=True, kw_only=True):
    """What is rendered: under which name, where to, and for which server."""

    name: str = "aenv"
    namespace: str = "aenv"
    version: tuple[int, int] = CURRENT
    """Of Kubernetes."""
    apis: frozenset[str] = frozenset()
    """What the server offers, as ``group/version``; without any, what its version is known for."""
    more_apis: frozenset[str] = frozenset()
    """What it offers beside that."""
    upgrade: bool = False

    def check(self) -> None:
        """Raise what is wrong with its names: those of objects are made of them."""
        for pattern, name, what in (
            (_RELEASE, self.name, "a release's name"),
            (_NAMESPACE, self.namespace, "a namespace"),
        ):
            if not pattern.fullmatch(name):
                raise Invalid(f"{name[:80]!r} is not {what}", hint="use small letters, digits and '-'")


class Object(NamedTuple):
    """One object, as its template says it."""

    source: str
    text: str
    content: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.content["kind"])

    @property
    def name(self) -> str:
        return str(self.content["metadata"]["name"])


class Rendered(NamedTuple):
    objects: list[Object]
    notes: str

    @property
    def text(self) -> str:
        return "".join(f"---\n# Source: {found.source}\n{found.text}\n" for found in self.objects)


class Chart:
    """A directory with a chart."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.about: dict[str, Any] = values.read(directory / "Chart.yaml")
        self.values = values.read(directory / "values.yaml")
        self.schema: dict[str, Any] = json.loads((directory / "values.schema.json").read_bytes())
        folder = directory / "templates"
        self._sources = {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.iterdir())}

    def effective(self, files: Iterable[Path] = (), settings: Iterable[str] = ()) -> dict[str, Any]:
        """The chart's values with those of ``files`` over them and ``settings`` over all, checked."""
        above: dict[str, Any] = {}
        for file in files:
            above = _over(above, values.read(file))
        found = values.merged(self.values, values.given(settings, above))
        schema.check(found, self.schema)
        return found

    def render(
        self,
        effective: Mapping[str, Any],
        release: Release,
        lookup: Callable[[str, str, str, str], Any] = lambda *asked: {},
    ) -> Rendered:
        """The objects, in the order in which they are to be made; ``lookup`` says what is there already."""
        release.check()
        offered = release.apis or {
            api for api, (first, last) in _VERSIONS.items() if first <= release.version[1] <= last
        }
        apis = offered | release.more_apis
        version = ".".join(map(str, release.version))
        root = {
            "Values": effective,
            "Chart": {"Name": self.about["name"], "Version": self.about["version"], **_titled(self.about)},
            "Release": {
                "Name": release.name,
                "Namespace": release.namespace,
                "Service": MANAGER,
                "IsUpgrade": release.upgrade,
                "IsInstall": not release.upgrade,
            },
            "Capabilities": {
                "APIVersions": {"Has": lambda api: api in apis},
                "KubeVersion": {"Version": f"v{version}.0", "Major": "1", "Minor": str(release.version[1])},
            },
        }
        renderer = Renderer(self._sources, lookup)
        found: list[Object] = []
        for name in self._sources:
            if not name.endswith(".yaml"):
                continue
            source = f"{self.about['name']}/templates/{name}"
            for text in documents.split(renderer.render(name, root)):
                loaded = documents.load_all(text, source)
                found += [Object(source, text, documents.plain(content)) for content in loaded]
        found.sort(key=lambda found: ORDER.index(found.kind) if found.kind in ORDER else len(ORDER))
        return Rendered(found, renderer.render(_NOTES, root).strip())


def chart() -> Chart:
    """Ours: in the installed package, or in the repository that it is worked on in."""
    installed = Path(__file__).parent.parent / "chart"
    directory = installed if installed.is_dir() else Path(__file__).parents[3] / "deploy" / "chart"
    if not directory.is_dir():
        raise Invalid(f"there is no chart in {directory}", hint="install the package anew")
    return Chart(directory)


def _titled(about: Mapping[str, Any]) -> dict[str, Any]:
    return {"AppVersion": about.get("appVersion", ""), "Description": about.get("description", "")}


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Like ``merged``, with nulls kept: they take away what is below all files."""
    result = dict(below)
    for key, value in above.items():
        held = result.get(key)
        result[key] = _over(held, value) if isinstance(held, dict) and isinstance(value, dict) else value
    return result
