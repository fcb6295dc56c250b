"""A project on disk: finding it, reading and checking its ``config.json``, and changing that file safely.

``scaffold`` makes a new one and ``pack`` turns one into an archive; both load on first use.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from aenv.config import replace_file
from aenv.errors import InvalidConfig, NotFound
from aenv.models import parse_duration
from aenv.project import fields
from aenv.project.depends import Dependency, dependencies
from aenv.project.scan import Scanned, scan

if TYPE_CHECKING:
    from aenv.project.archive import digest, pack
    from aenv.project.scaffolding import TEMPLATES, scaffold

__all__ = ["TEMPLATES", "Project", "Timeouts", "digest", "find", "pack", "read", "scaffold", "write"]

CONFIG = "config.json"
_HOME = {"TEMPLATES": "scaffolding", "scaffold": "scaffolding", "pack": "archive", "digest": "archive"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'aenv.project' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"aenv.project.{_HOME[name]}"), name)


class Timeouts(NamedTuple):
    """Seconds; None where the project leaves it to the platform."""

    startup: float | None = None
    call: float | None = None
    idle: float | None = None
    suspend: float | None = None


@dataclass(frozen=True)
class Project:
    """A directory that an author edits, as it was when it was read."""

    root: Path
    name: str
    version: str
    config: dict[str, Any] = field(repr=False)
    """``config.json`` as written: unknown fields and order kept."""
    warnings: tuple[str, ...] = ()

    @property
    def source(self) -> Path:
        """Where the author's modules are: ``src``, else the root."""
        source = self.root / "src"
        return source if source.is_dir() else self.root

    def value(self, path: str) -> Any:
        """A field by its dotted path (``deployConfig.service.port``); its default when it is not set."""
        return fields.value(self.config, path)

    @property
    def description(self) -> str:
        return str(self.value("description"))

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(self.value("tags"))

    @property
    def ttl(self) -> float | None:
        """Seconds an instance lives; None when the project does not say."""
        return self._seconds("deployConfig.ttl")

    @property
    def timeouts(self) -> Timeouts:
        return Timeouts(*(self._seconds(f"deployConfig.timeouts.{name}") for name in Timeouts._fields))

    @property
    def environment_variables(self) -> dict[str, str]:
        return {name: str(value) for name, value in self.value("deployConfig.environmentVariables").items()}

    @property
    def protocol(self) -> str | None:
        """The MCP revision the project insists on, if any."""
        found: str | None = self.value("deployConfig.protocol")
        return found

    @property
    def deterministic(self) -> bool:
        """Whether the same calls after the same seed come to the same, by the author's word."""
        return bool(self.value("deployConfig.deterministic"))

    @property
    def forkable(self) -> bool:
        """Whether its instances may be forked while they live, by the author's word."""
        return bool(self.value("deployConfig.forkable"))

    @property
    def test_script(self) -> str:
        """The author's own test command; empty when ``test/`` is to be run."""
        return str(self.value("testConfig.script")).strip()

    @property
    def dockerfile(self) -> Path:
        return self.root / str(self.value("buildConfig.dockerfile"))

    @property
    def is_dual(self) -> bool:
        """Whether instances have a second container, the task's own. See ``aenv.project.images``."""
        from aenv.project.images import is_dual

        return is_dual(str(self.value("deployConfig.podTemplate")))

    @property
    def image_prefix(self) -> str:
        """What the names of second images begin with."""
        return str(self.value("deployConfig.imagePrefix") or "")

    @property
    def depends_on(self) -> dict[str, Dependency]:
        """The environments that it is composed of, by alias."""
        return dependencies({"dependsOn": self.value("deployConfig.dependsOn")})

    @property
    def datasource(self) -> str:
        """What instances have that name none."""
        return str(self.value("deployConfig.datasource") or "")

    @property
    def storage_name(self) -> str:
        return str(self.value("deployConfig.service.storageName") or self.name)

    def _seconds(self, path: str) -> float | None:
        found = self.value(path)
        return None if found is None else parse_duration(found, path)


def find(path: str | os.PathLike[str]) -> Path:
    """The root of the project at ``path``: the root itself, its ``src`` folder, or its ``config.json``.

    A directory without ``config.json`` is its own root.
    """
    given = Path(path).absolute()
    if not given.exists():
        raise NotFound(f"{given} does not exist", hint="give the directory of a project")
    if given.name == CONFIG and given.is_file():
        return given.parent
    if not given.is_dir():
        raise InvalidConfig(f"{given} is not a directory", hint="give the directory of a project")
    if given.name == "src" and not (given / CONFIG).is_file() and (given.parent / CONFIG).is_file():
        return given.parent
    return given


def read(path: str | os.PathLike[str] = ".", *, config_required: bool = True) -> Project:
    """The project at ``path``, checked; ``InvalidConfig`` names every mistake with its file and line.

    Without ``config_required``, a bare folder of modules is a project too: named after the folder, version
    0.0.0.
    """
    root = find(path)
    file = root / CONFIG
    if not file.is_file():
        if config_required:
            raise InvalidConfig(
                f"there is no {CONFIG} in {root}",
                hint="run 'aenv init NAME' to make a project, or give the directory of one with --work-dir",
            )
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", root.resolve().name).strip("._-")[:63]
        return Project(root, name or "project", "0.0.0", {})
    return _checked(root, _text(file))


def write(project: Project, changes: Mapping[str, Any]) -> Project:
    """Merge ``changes`` into the project's ``config.json`` and return the project as it is then.

    The file is read again first, so what an editor changed meanwhile stays. Order, unknown fields and
    indentation are kept; a result that would be invalid is refused and nothing is written.
    """
    file = (project.root / CONFIG).resolve()
    text = _text(file)
    indent = re.search(r'^([ \t]+)"', text, re.MULTILINE)
    merged = _merged(scan(text, _shown(file)).value, changes)
    new = json.dumps(merged, indent=indent[1] if indent else 2, ensure_ascii=False) + "\n"
    changed = _checked(project.root, new)
    replace_file(file, new, mode=file.stat().st_mode & 0o7777)
    return changed


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, Mapping):
        return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}
    return new


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as exc:
        raise InvalidConfig(f"{_shown(file)} is not UTF-8 text", hint="save it as UTF-8") from exc
    except OSError as exc:
        raise InvalidConfig(f"{_shown(file)} cannot be read: {exc.strerror}") from exc


def _checked(root: Path, text: str) -> Project:
    known = _parsed(root, _shown(root / CONFIG), text)
    return replace(known, config=copy.deepcopy(known.config))  # what one reader changes is nobody else's


@functools.lru_cache(maxsize=256)
def _parsed(root: Path, file: str, text: str) -> Project:
    """The project with this text in its ``file``. A trainer asks for the same one at each start of a sandbox."""
    scanned = scan(text, file)
    found = fields.problems(scanned.value)
    errors = [f"{file}:{_line(scanned, problem)}: {problem.message}" for problem in found if problem.fatal]
    if errors:
        raise InvalidConfig("\n".join(errors))
    warnings = [f"{file}:{_line(scanned, problem)}: {problem.message}" for problem in found]
    warnings += [
        f"{file}:{scanned.lines[where]}: {fields.dotted(where)} is given twice; the last one counts"
        for where in scanned.repeated
    ]
    config: dict[str, Any] = scanned.value
    return Project(root, config["name"], config["version"], config, tuple(warnings))


def _line(scanned: Scanned, problem: fields.Problem) -> int:
    """The line of the nearest enclosing value that is there."""
    where = problem.where
    while where not in scanned.lines:
        where = where[:-1]
    return scanned.lines[where]


def _shown(file: Path) -> str:
    """``file`` as a person in this directory would write it."""
    try:
        return str(file.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(file)
