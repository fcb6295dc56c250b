"""An OpenAPI document as it is found: a file or an address, in JSON or YAML, of a bounded size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from aenv.errors import Invalid, NetworkError
from aenv.integrations.wrapping import CONNECT, is_url

MOST_DOCUMENT = 16 * 1024 * 1024
_MOST_VALUES = 1_000_000
_DEEPEST = 200


def fetch(source: str) -> dict[str, Any]:
    """The document, as JSON has it."""
    text = _downloaded(source) if is_url(source) else _file(Path(source))
    found = parse(text, source)
    if not isinstance(found, dict):
        raise Invalid(f"{source} is no OpenAPI document: an object is needed")
    return found


def parse(text: bytes, source: str) -> Any:
    """JSON, or else YAML."""
    try:
        return json.loads(text)
    except RecursionError:
        raise Invalid(f"{source} is nested too deeply") from None
    except ValueError as exc:
        if text.lstrip()[:1] in (b"{", b"["):
            raise Invalid(f"{source} is no JSON: {exc}") from None
    import yaml

    try:
        return _plain(yaml.load(text, _loader()), [_MOST_VALUES], 0, source)  # noqa: S506 - it makes plain values only
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as exc:
        raise Invalid(f"{source} is neither JSON nor YAML: {exc}", hint="give the OpenAPI document itself") from None


def _loader() -> Any:
    """YAML without dates, which stay the texts that they are."""
    import yaml

    resolvers = {
        first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:timestamp"]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    return type("Loader", (yaml.SafeLoader,), {"yaml_implicit_resolvers": resolvers})


def _plain(value: Any, left: list[int], depth: int, source: str) -> Any:
    """What JSON can carry. Anchors that stand for one another could make a small file a huge document."""
    left[0] -= 1
    if left[0] < 0 or depth > _DEEPEST:
        raise Invalid(f"{source} is too large, or nested too deeply")
    if isinstance(value, dict):
        return {str(key): _plain(inner, left, depth + 1, source) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner, left, depth + 1, source) for inner in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    raise Invalid(f"{source} has a value that JSON does not know: {type(value).__name__}")


def _file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            text = file.read(MOST_DOCUMENT + 1)
    except OSError as exc:
        raise Invalid(
            f"{path} cannot be read: {exc.strerror}", hint="give the path or the URL of an OpenAPI document"
        ) from None
    return _bounded(text, str(path))


def _downloaded(url: str) -> bytes:
    try:
        with httpx.stream("GET", url, timeout=CONNECT, headers={"Accept": "application/json, */*;q=0.5"}) as response:
            if response.status_code != 200:
                where = response.headers.get("location")
                raise NetworkError(
                    f"{url} answered with status {response.status_code}",
                    hint=f"it sends its askers to {where}" if where else "give the URL of the OpenAPI document itself",
                )
            text = b""
            for piece in response.iter_bytes():
                text = _bounded(text + piece, url)
            return text
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise NetworkError(f"{url} cannot be reached: {exc}", hint="is the service up, and the URL right?") from exc


def _bounded(text: bytes, source: str) -> bytes:
    if len(text) > MOST_DOCUMENT:
        raise Invalid(f"{source} is larger than {MOST_DOCUMENT // 1024**2} MiB")
    return text
