"""Settings, and the only place that reads the process environment.

A value comes from, first match wins: the argument a caller gave, the environment variable, the user's config
file (``~/.aenv/config.json``), the default.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from aenv.errors import AEnvError, InvalidConfig, did_you_mean


class Setting(NamedTuple):
    key: str
    variable: str
    default: Any
    about: str
    in_file: bool = True
    """Whether the user's config file may hold it. What an engine tells one sandbox may not."""
    secret: bool = False
    least: float = 0
    """The smallest value of a number."""
    shared: bool = False
    """Whether other programs read the variable too: then an author's code sees it, when it is given to a sandbox."""


SETTINGS = (
    Setting("system_url", "AENV_SYSTEM_URL", None, "address of the platform; port 8080 when none is given"),
    Setting("hub_url", "AENV_HUB_URL", None, "address of the hub; the system URL when not set"),
    Setting("api_key", "AENV_API_KEY", None, "token sent with every request", secret=True),
    Setting("store", "AENV_STORE", None, "where a server's records are, if --store does not say", secret=True),
    Setting(
        "first_token",
        "AENV_FIRST_TOKEN",
        None,
        "the first admin's token, for a store where nobody is an admin yet",
        in_file=False,
        secret=True,
    ),
    Setting(
        "hub_key",
        "AENV_HUB_KEY",
        None,
        "token of an API service itself, for its hub elsewhere; the variable lets it in at a hub, to read and no more",
        secret=True,
    ),
    Setting(
        "metrics_token",
        "AENV_METRICS_TOKEN",
        None,
        "a token for reading that a server takes beside those of its store: for what reads its metrics",
        in_file=False,
        secret=True,
    ),
    Setting("s3_access_key", "AENV_S3_ACCESS_KEY", None, "key to the bucket that packages are kept in", secret=True),
    Setting("s3_secret_key", "AENV_S3_SECRET_KEY", None, "the secret that belongs to that key", secret=True),
    Setting("s3_session_token", "AENV_S3_SESSION_TOKEN", None, "a token that goes with a temporary key", secret=True),
    Setting("attach", "DUMMY_INSTANCE_IP", None, "attach to a sandbox that 'aenv run' started", in_file=False),
    Setting("max_body", "AENV_MAX_BODY", 64 * 1024 * 1024, "largest request body a sandbox accepts, in bytes", least=1),
    Setting("grace", "AENV_GRACE", 10.0, "seconds that calls in flight get to finish when a sandbox stops"),
    Setting(
        "drain",
        "AENV_DRAIN",
        0.0,
        "seconds that a server that is to stop says so in its health, and serves on, before it stops",
    ),
    Setting("threads", "AENV_THREADS", 512, "most synchronous tools that run at the same time in a sandbox", least=1),
    Setting("allowed_hosts", "AENV_ALLOWED_HOSTS", "", "more names, by comma, accepted in Host and Origin"),
    Setting(
        "health_interval",
        "AENV_HEALTH_INTERVAL",
        30.0,
        "seconds between a sandbox's own health checks",
        least=0.1,
    ),
    Setting(
        "engine",
        "AENV_ENGINE",
        None,
        "where sandboxes come from: process, docker, kubernetes, http=URL, plain or pkg.mod:Class; process if not set",
    ),
    Setting(
        "controller_key",
        "AENV_CONTROLLER_KEY",
        None,
        "token for the controller of the engine http=URL; that of api_key when not set",
        secret=True,
    ),
    Setting("isolation", "AENV_ISOLATION", "auto", "how sandboxes are shut in on this machine: auto, strict or none"),
    Setting("docker_host", "AENV_DOCKER_HOST", None, "where Docker or Podman listens: unix:///path or tcp://host:port"),
    Setting("docker_default", "DOCKER_HOST", None, "the same, where AENV_DOCKER_HOST is not set", in_file=False),
    Setting(
        "base_image", "AENV_BASE_IMAGE", "aenv-base", "image of containers for projects that have none of their own"
    ),
    Setting("docker_runtime", "AENV_DOCKER_RUNTIME", "", "what runs containers, where not the daemon's own: runsc"),
    Setting("kubeconfig", "AENV_KUBECONFIG", None, "file that says where the Kubernetes cluster is, and who asks it"),
    Setting(
        "kubeconfig_default",
        "KUBECONFIG",
        None,
        "the same, where AENV_KUBECONFIG is not set",
        in_file=False,
        shared=True,
    ),
    Setting("kube_context", "AENV_KUBE_CONTEXT", None, "context of that file; its current one when not set"),
    Setting("namespace", "AENV_NAMESPACE", None, "namespace that pods of sandboxes are in; the context's when not set"),
    Setting(
        "pod_access", "AENV_POD_ACCESS", "auto", "how pods are reached: direct, tunnel, or auto: direct in a pod alone"
    ),
    Setting("pod_templates", "AENV_POD_TEMPLATES", "", "directory of a site's pod templates, NAME.yaml or NAME.json"),
    Setting(
        "longest_life", "AENV_LONGEST_LIFE", 7 * 86400.0, "seconds after which a cluster ends any instance", least=1
    ),
    Setting(
        "extended_resources",
        "AENV_EXTENDED_RESOURCES",
        "",
        "names, by comma, of what only some nodes have that any caller may ask a cluster for: nvidia.com/gpu",
    ),
    Setting("kubernetes_host", "KUBERNETES_SERVICE_HOST", None, "the cluster that a pod is in", in_file=False),
    Setting("kubernetes_port", "KUBERNETES_SERVICE_PORT", "443", "its port", in_file=False),
    Setting(
        "journal",
        "AENV_JOURNAL",
        4 * 1024 * 1024,
        "bytes that a client keeps of calls and answers, to fork, restore and fast-forward by; 0 keeps none",
        least=0,
    ),
    Setting("spare", "AENV_SPARE", True, "keep one process per environment in use ready for the next sandbox"),
    Setting(
        "suspend",
        "AENV_SUSPEND",
        "",
        "time without a call after which the process engine has a sandbox stand still until the next one, where its "
        "project says nothing: 30s, 5m; empty is never",
    ),
    Setting("log_format", "AENV_LOG_FORMAT", "text", "how a server writes its log: text, or json, an object a line"),
    Setting("traces", "AENV_TRACES", None, "URL of an OpenTelemetry collector (OTLP/HTTP) that traces are sent to"),
    Setting(
        "otel_endpoint",
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        None,
        "the same, where AENV_TRACES is not set",
        in_file=False,
        shared=True,
    ),
    Setting(
        "otel_headers",
        "OTEL_EXPORTER_OTLP_HEADERS",
        None,
        "headers for the collector: name=value, by comma, percent-encoded",
        in_file=False,
        secret=True,
        shared=True,
    ),
    Setting(
        "otel_service_name", "OTEL_SERVICE_NAME", "aenv", "what traces call this process", in_file=False, shared=True
    ),
    Setting(
        "otel_sampler_arg",
        "OTEL_TRACES_SAMPLER_ARG",
        1.0,
        "share of the traces begun here that is kept, from 0 to 1",
        in_file=False,
        shared=True,
    ),
    Setting(
        "model_url",
        "OPENAI_BASE_URL",
        "https://api.openai.com/v1",
        "where models that speak OpenAI's API are asked, when a rollout names none",
        shared=True,
    ),
    Setting("model_key", "OPENAI_API_KEY", None, "the key for that", in_file=False, secret=True, shared=True),
    Setting(
        "models_token",
        "AENV_MODELS_TOKEN",
        None,
        "token of those who begin episodes at 'aenv serve models'; on the loopback, else this user's",
        in_file=False,
        secret=True,
    ),
    Setting("debug", "AENV_DEBUG", False, "show the traceback of an unexpected failure", in_file=False),
    Setting("instance_id", "AENV_INSTANCE_ID", "local", "what the engine calls this sandbox", in_file=False),
    Setting("datasource", "AENV_DATASOURCE", "", "the instance's data, as a path", in_file=False),
    Setting("seed", "AENV_SEED", None, "the instance's random seed", in_file=False),
    Setting("secrets", "AENV_SECRETS", "", "names, by comma, of variables that a sandbox never shows", in_file=False),
    Setting("socket", "AENV_SOCKET", "", "unix socket that a sandbox listens on, instead of a port", in_file=False),
    Setting(
        "listen", "AENV_LISTEN", "", "host:port that a sandbox listens on, whatever its command says", in_file=False
    ),
    Setting("delivery", "AENV_DELIVERY", False, "wait for what the engine brings: variables, a project", in_file=False),
    Setting("work", "AENV_WORK", "", "directory that a sandbox copies its project to, and works in", in_file=False),
    Setting("second", "AENV_SECOND", "", "unix socket of the agent in the second container", in_file=False),
    Setting("proxy", "AENV_PROXY", "", "host:port of the proxy that a sandbox waits for when it starts", in_file=False),
    Setting("until_eof", "AENV_UNTIL_EOF", False, "end when standard input does", in_file=False),
    Setting("warm", "AENV_WARM", False, "wait to be specialised before the project is imported", in_file=False),
    Setting("preload", "AENV_PRELOAD", "", "whether one that waits imports it first: true, false, auto", in_file=False),
    Setting(
        "owner_token_sha256",
        "AENV_OWNER_TOKEN_SHA256",
        None,
        "digest of the owner token a sandbox asks for",
        in_file=False,
    ),
    Setting(
        "engine_token_sha256",
        "AENV_ENGINE_TOKEN_SHA256",
        None,
        "digest of the token that the engine itself comes with",
        in_file=False,
    ),
    Setting("idle", "AENV_IDLE", 0.0, "seconds without a call after which a sandbox ends; 0 is never", in_file=False),
)
_BY_KEY = {setting.key: setting for setting in SETTINGS}


def home() -> Path:
    """Where this user's files live: ``AENV_HOME``, else ``~/.aenv``."""
    return Path(os.environ.get("AENV_HOME") or Path.home() / ".aenv")


def path() -> Path:
    """The user's config file."""
    return home() / "config.json"


def read_file() -> dict[str, Any]:
    """What the user's config file holds; an empty dict when there is none."""
    file = path()
    try:
        values = json.loads(file.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as exc:
        raise InvalidConfig(f"{file} cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise InvalidConfig(f"{file} is not valid JSON: {exc}", hint="mend it, or run 'aenv config reset'") from exc
    if not isinstance(values, dict):
        raise InvalidConfig(f"{file} must hold a JSON object", hint="run 'aenv config reset' to start over")
    return values


def write_file(values: Mapping[str, Any]) -> None:
    """Replace the user's config file in one step, readable by its user only."""
    text = json.dumps(dict(values), indent=2) + "\n"
    replace_file(path(), text, folder_mode=0o700, mode=0o600)


def replace_file(file: Path, text: str, *, mode: int = 0o666, folder_mode: int = 0o777) -> None:
    """Write a file in one step: whoever reads it finds the old text or the new, also when the disk is full."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=folder_mode)
        temporary.unlink(missing_ok=True)
        temporary.touch(mode=mode, exist_ok=False)
        # backslashreplace: half a surrogate pair is legal as a JSON escape, but has no UTF-8 form.
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        temporary.replace(file)
    except OSError as exc:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise AEnvError(f"{file} cannot be written: {exc.strerror or exc}", hint="nothing was changed there") from exc


def setting(key: str) -> Setting:
    """The setting of that name; an unknown one is answered with the nearest."""
    if key not in _BY_KEY:
        raise InvalidConfig(f"there is no setting {key!r}", hint=did_you_mean(key, _BY_KEY))
    return _BY_KEY[key]


def coerce(found: Setting, value: Any, where: str) -> Any:
    """``value`` as the type of the setting's default; an error that names where it came from."""
    hint = f"{found.key}: {found.about}"
    if value is None:
        return value
    if not isinstance(found.default, (int, float)):
        if not isinstance(value, str):
            raise InvalidConfig(f"{where}: {value!r} is not text", hint=hint)
        return value
    kind = type(found.default)
    if kind is bool:
        return str(value).strip().lower() not in ("", "0", "false", "no", "off")
    try:
        number = kind(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None or isinstance(value, bool):
        raise InvalidConfig(f"{where}: {value!r} is not a number", hint=hint)
    if not number >= found.least:
        raise InvalidConfig(f"{where}: {value!r} is less than {found.least:g}", hint=hint)
    return number


def lookup(key: str, argument: Any = None) -> tuple[Any, str]:
    """A setting's value, and where it came from."""
    found = setting(key)
    if argument is not None:
        return argument, "argument"
    if value := os.environ.get(found.variable):
        return coerce(found, value, found.variable), f"environment variable {found.variable}"
    if found.in_file and (value := read_file().get(key)) is not None:
        return coerce(found, value, f"{path()}: {key}"), str(path())
    return found.default, "default"


def get(key: str, argument: Any = None) -> Any:
    """A setting's value: argument, environment variable, config file, default."""
    return lookup(key, argument)[0]


def variable(key: str) -> Any:
    """A setting's value by its environment variable alone; None when that is not set."""
    found = setting(key)
    return coerce(found, os.environ.get(found.variable) or None, found.variable)


def environment() -> dict[str, str]:
    """The process environment as an author's code may see it, without what is meant for the runtime alone."""
    hidden = {found.variable for found in SETTINGS if not found.shared}
    return {name: value for name, value in os.environ.items() if name not in hidden}


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment for a sandbox we start: ``extra`` over this process's, less what concerns this process alone."""
    hidden = {found.variable for found in SETTINGS if found.secret or not found.in_file}
    return {name: value for name, value in os.environ.items() if name not in hidden} | dict(extra)


def named(name: str) -> str:
    """What a variable holds that the operator names, such as the key of a provider; empty when it is not set."""
    return os.environ.get(name, "")


def agent_environment(extra: Mapping[str, str], without: Iterable[str] = ()) -> dict[str, str]:
    """The environment for an agent's program: all of this process's, such as the key of its model, but none of the
    platform's secrets, with which it could take its own reward, nor what is named in ``without``."""
    hidden = {found.variable for found in SETTINGS if found.secret and found.variable.startswith("AENV_")}
    hidden |= set(without)
    return {name: value for name, value in os.environ.items() if name not in hidden} | dict(extra)


def default_environment(values: Mapping[str, str]) -> None:
    """Set those variables of this process that are not set yet."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def set_environment(values: Mapping[str, str]) -> None:
    """Set these variables of this process."""
    os.environ.update(values)


def replace_environment(values: Mapping[str, str]) -> None:
    """Make these the variables of this process, and no others."""
    for name in [name for name in os.environ if name not in values]:
        del os.environ[name]
    for name, value in values.items():
        if os.environ.get(name) != value:  # what stays as it is need not be written
            os.environ[name] = value


def colour(stream: TextIO) -> bool:
    """Whether what is written to ``stream`` may be coloured."""
    return not os.environ.get("NO_COLOR") and stream.isatty()
