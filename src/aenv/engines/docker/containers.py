"""From a spec to the container that the daemon is asked for, and from what the daemon says of one to words. Pure."""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from aenv.engines import egress, live
from aenv.engines.docker.images import Image
from aenv.engines.egress import clients
from aenv.engines.room import CPU, amount, room
from aenv.errors import Invalid
from aenv.models import SandboxSpec

ENGINE, ID, FACTS, KIND, PROCESS = "aenv.engine", "aenv.id", "aenv.spec", "aenv.kind", "aenv.process"
"""Labels: whose it is, which sandbox, what ``find`` tells again, what it is for, and the process that it ends with."""
SANDBOX, SECOND, PROJECT, SOCKETS = "sandbox", "second", "project", "socket"
"""Kinds: a container that runs, the second one of a sandbox, one that keeps a project's volume, and the volume of a
socket."""
USER = 1000
DOOR, WORK, PROJECTS, DATA = "/run/aenv", "/work", "/aenv/project", "/datasource"
LINK, SHARED = "/aenv/link", "/shared"
"""Where things are inside."""
SOCKET, SECOND_SOCKET = "runtime.sock", "second.sock"
TMP = "/tmp"  # noqa: S108
PROCESSES = 512
LONGEST_VARIABLE = 128 * 1024 - 1
"""Bytes of ``NAME=value``: the kernel gives no longer one to a program."""
MOST_VARIABLES = 2 * 1024**2 - 128 * 1024
"""Bytes of all of them: a quarter of a stack of 8 MiB, less what else is there."""
MOST_LOG = 1024**2
"""Bytes of output that the daemon keeps."""
_PERIOD = 100_000
_SMALL = ("/run", "/var/tmp")  # noqa: S108
"""What Podman puts into memory where a root is read-only, without a bound; so it is ours, and there is little room."""
_SHM = 64 * 1024**2
"""Bytes that ``/dev/shm`` holds at most: what daemons give."""
_RESERVED = (
    *(DOOR, WORK, "/aenv", DATA, SHARED, TMP),
    *("/proc", "/sys", "/dev", "/etc", "/usr", "/bin", "/sbin", "/lib", "/lib64"),
)
_SHELL_COMMAND = re.compile("-[a-z]*c")
_SHELLS = ("sh", "bash", "dash", "ash", "zsh")
_NO_RUNTIME = re.compile(r"No module named '?aenv\b")
_END = 'let its Dockerfile end in ENTRYPOINT ["python", "-m", "aenv.runtime", "PATH"]'
_INSTALL = f"install the runtime in it, and {_END}"
_OTHER_PROCESSOR = "what it runs is for another kind of processor: build it for the daemon's --platform"
_SIGNALS = 128
_KILLED = _SIGNALS + 9


class Facts(live.Facts, frozen=True, kw_only=True, omit_defaults=True):
    """What must be known of a container's sandbox."""

    lasting: bool = False
    door: str = ""
    """``socket`` or ``tunnel``."""
    python: str = "python3"
    """The interpreter of its image."""
    allow: list[str] | None = None
    """The hosts that it reaches by the egress proxy; None when it has none."""


class Site(NamedTuple):
    """What all containers of an engine share."""

    engine: str
    """The value of the label that all of its containers have."""
    log_driver: str
    runtime: str = ""
    until_eof: bool = False
    """Whether they end with the engine."""
    process: str = ""
    """Which process that is then, as others can tell whether it is dead."""


class Mounted(NamedTuple):
    """What is mounted into one container, beside memory."""

    door: str = ""
    """The volume for its socket; empty when that is in memory."""
    project: str = ""
    """The container that keeps its project's volume; empty when the project is in the image."""
    volumes: Sequence[tuple[str, str]] = ()
    """Volumes of the daemon, each with the path where it is inside."""
    link: str = ""
    """The volume of the socket of its second container; empty when it has none."""
    shared: str = ""
    """The volume that it shares with that."""


def name(engine: str, id: str) -> str:
    """What a sandbox's container is called: two of one id collide."""
    return f"aenv-{engine}-{id}"


def short(*words: str) -> str:
    """A few characters that stand for those words in the names of volumes and files."""
    return hashlib.sha256("\0".join(words).encode(errors="surrogatepass")).hexdigest()[:16]


def facts(id: str, spec: SandboxSpec, created_at: float) -> Facts:
    return Facts.of(id, spec, created_at, lasting=spec.lasting, allow=allowed(spec))


def allowed(spec: SandboxSpec) -> list[str] | None:
    """The hosts that it may reach by the egress proxy; None when its network is another."""
    return spec.network["allow"] if isinstance(spec.network, dict) else None


def proxy_variables(spec: SandboxSpec) -> dict[str, str]:
    """What programs inside are told of that proxy."""
    hosts = allowed(spec)
    return {} if hosts is None else clients.variables(hosts)


def python(image: Image) -> str:
    """The interpreter that an image runs."""
    first = image.command[0] if image.command else ""
    return first if posixpath.basename(first).startswith("python") else "python3"


def facts_of(labels: Mapping[str, str] | None) -> Facts | None:
    """What the labels of a container tell; None when it is none of ours."""
    try:
        return msgspec.json.decode((labels or {})[FACTS], type=Facts)
    except (KeyError, msgspec.MsgspecError):
        return None


def body(
    spec: SandboxSpec,
    known: Facts,
    image: Image,
    *,
    site: Site,
    mounted: Mounted,
    network: str,
    key_sha256: str,
) -> dict[str, Any]:
    """What is posted to ``/containers/create``. ``key_sha256`` is of the token that the engine itself comes with."""
    share = room(spec)
    mounts: list[dict[str, Any]] = [
        {"Type": "volume", "Source": one, "Target": place} for one, place in mounted.volumes
    ]
    if mounted.door:
        mounts.append(volume(mounted.door, DOOR))
    if mounted.link:
        mounts.append({**volume(mounted.link, LINK), "ReadOnly": True})
        mounts.append(volume(mounted.shared, SHARED))
    if spec.datasource:
        mounts.append({"Type": "bind", "Source": spec.datasource, "Target": DATA, "ReadOnly": True})
    taken = [DOOR, *([PROJECTS] if mounted.project else ()), *(one["Target"] for one in mounts)]
    places = writable(image, (TMP, WORK), taken)
    small = _SMALL if mounted.door else (*_SMALL, DOOR)
    tmpfs = dict.fromkeys(small, "rw,noexec,nosuid,nodev,mode=1777,size=4m")
    tmpfs |= dict.fromkeys(places, in_memory(share.storage(share.main, len(places))))
    host: dict[str, Any] = {
        **limits(spec, share.main, site),
        "NetworkMode": network,
        "ReadonlyRootfs": True,
        "Tmpfs": tmpfs,
        "Mounts": mounts,
    }
    if mounted.project:
        host["VolumesFrom"] = [f"{mounted.project}:ro"]
    return {
        "Image": image.id,
        "User": f"{USER}:{USER}",
        "Hostname": "sandbox",
        "Env": variables(spec, known.id, image, until_eof=site.until_eof, key_sha256=key_sha256),
        "Healthcheck": {"Test": ["NONE"]},
        "OpenStdin": site.until_eof,
        "StdinOnce": site.until_eof,
        "Labels": {
            ENGINE: site.engine,
            ID: known.id,
            KIND: SANDBOX,
            FACTS: msgspec.json.encode(known).decode(),
            **({PROCESS: site.process} if site.process else {}),
        },
        "HostConfig": host,
        **_command(spec, image),
    }


def limits(spec: SandboxSpec, memory: int, site: Site) -> dict[str, Any]:
    """What both containers of a sandbox have in common: no powers, and an end to what they take."""
    common: dict[str, Any] = {
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "IpcMode": "private",
        "Init": False,
        "PidsLimit": PROCESSES,
        "Memory": memory,
        "MemorySwap": memory,
        "ShmSize": min(_SHM, memory // 8),
        "CpuPeriod": _PERIOD,
        "CpuQuota": max(int(amount(spec.resources, "cpu", CPU) * _PERIOD), 1000),
        "LogConfig": {"Type": site.log_driver, "Config": {"max-size": str(MOST_LOG)}},
    }
    return {**common, "Runtime": site.runtime} if site.runtime else common


def writable(image: Image, ours: Sequence[str], taken: Sequence[str]) -> list[str]:
    """Directories that are in memory: ours, and the volumes of an image, which a daemon would put on its disk; but for
    those that are ``taken`` by something else."""
    found = dict.fromkeys((*ours, *(posixpath.normpath("/" + place.lstrip("/")) for place in image.volumes)))
    return [place for place in found if place not in taken]


def in_memory(size: int) -> str:
    """The options of a file system in memory."""
    return f"rw,exec,nosuid,nodev,mode=1777,size={size // 1024}k"


def volume(name: str, place: str) -> dict[str, Any]:
    """A volume of the daemon, with nothing of the image's in it."""
    return {"Type": "volume", "Source": name, "Target": place, "VolumeOptions": {"NoCopy": True}}


def variables(spec: SandboxSpec, id: str, image: Image, *, until_eof: bool, key_sha256: str) -> list[str]:
    """The spec's, and over them what the runtime is told."""
    told = {
        "AENV_INSTANCE_ID": id,
        "AENV_DATASOURCE": DATA if spec.datasource else "",
        "AENV_SECRETS": ",".join(spec.secrets),
        "AENV_OWNER_TOKEN_SHA256": spec.owner_token_sha256 or "",
        "AENV_ENGINE_TOKEN_SHA256": key_sha256,
        "AENV_SOCKET": f"{DOOR}/{SOCKET}",
        "AENV_WORK": WORK,
        "AENV_SECOND": f"{LINK}/{SECOND_SOCKET}" if spec.second is not None else "",
        "AENV_PROXY": "" if allowed(spec) is None else clients.ADDRESS,
        "AENV_UNTIL_EOF": "1" if until_eof else "",
        "AENV_WARM": "1" if spec.warm else "",
        "AENV_PRELOAD": str(preload(spec)).lower() if spec.warm else "",
        "AENV_SEED": "" if spec.seed is None else str(spec.seed),
        "AENV_IDLE": f"{spec.idle:g}" if spec.idle and not spec.lasting else "",
        "PYTHONUNBUFFERED": "1",
    }
    home = {} if "HOME" in image.environment else {"HOME": TMP}
    given = {**home, **proxy_variables(spec), **spec.environment_variables, **told}
    found = [f"{name}={value}" for name, value in given.items()]
    sizes = [len(text.encode(errors="surrogatepass")) for text in found]
    for name in spec.environment_variables:
        if not name or "=" in name or "\0" in name or "\0" in spec.environment_variables[name]:
            raise Invalid(f"{name[:100]!r} cannot be a variable", hint="a name has no '=', and nothing has a zero byte")
    for text, size in zip(found, sizes, strict=True):
        if size > LONGEST_VARIABLE:
            raise Invalid(
                f"the variable {text.partition('=')[0][:100]} has {size} bytes; Linux gives a program no variable of "
                f"more than {LONGEST_VARIABLE}, its name counted",
                hint="upload a file instead, or split it",
            )
    if (total := sum(sizes)) > MOST_VARIABLES:
        raise Invalid(
            f"the variables have {total} bytes together; {MOST_VARIABLES} is the most that Linux gives a program",
            hint="upload a file instead",
        )
    return found


def preload(spec: SandboxSpec) -> bool | str:
    """Whether a container that waits imports its project first: ``auto`` when what the import does decides. It may look
    into a volume, so with those it comes later unless the author says otherwise."""
    return False if spec.preload == "auto" and spec.volumes else spec.preload


def _command(spec: SandboxSpec, image: Image) -> dict[str, Any]:
    """What it runs: the image's own command, or the runtime of the base image."""
    if not spec.image:
        after = ["--", *spec.arguments] if spec.arguments else []
        return {"Entrypoint": [python(image), "-m", "aenv.runtime"], "Cmd": [PROJECTS, *after]}
    if not image.command:
        raise Invalid(f"the image {spec.image} says nowhere what to run", hint=_END)
    if not spec.arguments:
        return {}
    if posixpath.basename(image.command[0]) in _SHELLS and any(map(_SHELL_COMMAND.fullmatch, image.command)):
        raise Invalid(f"the image {spec.image} starts with a shell, which passes no arguments on", hint=_END)
    return {"Entrypoint": [*image.command, "--", *spec.arguments], "Cmd": []}


def check(spec: SandboxSpec) -> None:
    """Refuse what no container can be."""
    if isinstance(spec.network, dict) and set(spec.network) == {"allow"}:
        egress.check(spec.network["allow"])
    elif spec.network not in (None, "none", "full"):
        raise Invalid(f"{spec.network!r} is not a network", hint="use 'none', 'full' or {'allow': ['host:port']}")
    if spec.datasource and not spec.datasource.startswith("/"):
        raise Invalid(f"the datasource {spec.datasource!r} is not an absolute path", hint="give one of this machine")
    for one in spec.volumes:
        place = posixpath.normpath(one.mount)
        if place == "/" or any(_overlap(place, reserved) for reserved in _RESERVED):
            hint = "use a directory of its own, such as /home/admin/data"
            raise Invalid(f"the volume {one.name!r} cannot be at {place}, which sandboxes need themselves", hint=hint)


def _overlap(place: str, other: str) -> bool:
    return place == other or place.startswith(f"{other}/") or other.startswith(f"{place}/")


# From what the daemon says


class Ended(NamedTuple):
    """How a container ended."""

    code: int
    out_of_memory: bool
    error: str
    at: float

    @property
    def well(self) -> bool:
        return self.code == 0 and not self.out_of_memory and not self.error

    def told(self, memory: int, words: str, who: str = "it") -> str:
        """Why, in words for a person. ``words`` is what it printed last."""
        much = f"took more than the {memory / 1024**2:g} MiB it may have"
        if self.out_of_memory:
            how = f"out of memory: {who} {much}"
        elif self.code == _KILLED:  # not every daemon hears of it when memory ran out
            how = f"signal 9 ended {who}: somebody's, or out of memory: it {much}"
        elif self.code > _SIGNALS:
            how = f"signal {self.code - _SIGNALS} ended {who}"
        else:
            how = f"{who} ended with exit code {self.code}"
        if self.error:
            how += f" ({self.error})"
        return f"{how}; it printed last:\n{words}" if words.strip() else f"{how}, and printed nothing"


def ended(inspected: Mapping[str, Any]) -> Ended | None:
    """How it ended; None while it runs, or has not begun to."""
    state = inspected.get("State") or {}
    if state.get("Status") not in ("exited", "dead", "stopped"):
        return None
    return Ended(
        code=int(state.get("ExitCode") or 0),
        out_of_memory=bool(state.get("OOMKilled")),
        error=str(state.get("Error") or ""),
        at=moment(str(state.get("FinishedAt") or "")),
    )


def is_going(inspected: Mapping[str, Any]) -> bool:
    """Whether it is being removed."""
    return (inspected.get("State") or {}).get("Status") == "removing"


def moment(text: str) -> float:
    """A time as the daemon writes it, as seconds since 1970; 0 for none."""
    if not text or text.startswith("0001-"):
        return 0.0
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return 0.0
    return (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()


def environment(inspected: Mapping[str, Any]) -> dict[str, str]:
    """The variables that it was given."""
    pairs: Iterable[str] = (inspected.get("Config") or {}).get("Env") or ()
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def mount_source(inspected: Mapping[str, Any], place: str) -> str:
    """Where what is mounted at ``place`` is on the daemon's machine; empty when nothing is."""
    found = [one for one in inspected.get("Mounts") or () if one.get("Destination") == place]
    return str(found[0].get("Source") or "") if found else ""


def end_hint(reason: str) -> str | None:
    """What can be done where a container ended before it was ready, for this reason."""
    if "exec format error" in reason.lower():
        return _OTHER_PROCESSOR
    return _INSTALL if _NO_RUNTIME.search(reason) else None


def start_failure(message: str, reference: str) -> tuple[str, str | None]:
    """Why a container did not start, and what can be done: what a daemon says is for those who know it well."""
    low = message.lower()
    if "exec format error" in low:
        return f"the image {reference} is for another kind of processor: {message}", _OTHER_PROCESSOR
    if "executable file not found" in low or ("no such file or directory" in low and "exec" in low):
        return f"the image {reference} cannot run its command: {message}", _INSTALL
    if "argument list too long" in low:
        return f"its variables and arguments are more than Linux gives a program: {message}", "upload a file instead"
    return message, None
