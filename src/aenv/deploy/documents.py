"""YAML as Helm and Kubernetes read it, which is not quite how PyYAML does, and text as Go prints it.

``y`` is true, ``1e3`` is a number, ``12:30`` and ``2024-01-01`` are text; every number is a float, as it is in Helm's
values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from aenv.errors import Invalid, Unsupported

try:
    import yaml
except ModuleNotFoundError:
    raise Unsupported("the pyyaml package is not installed", hint="pip install 'aenvironment[kubernetes]'") from None

_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_INT = re.compile(r"[-+]?(0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|(0|[1-9][0-9_]*))")
_DIGITS = re.compile(f"(?:{_FLOAT.pattern}|{_INT.pattern})$")
_LETTER = re.compile("[yYnN]$")
_NUMBER = "tag:yaml.org,2002:float"


class _Loader(yaml.SafeLoader):
    pass


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _resolvers(*dropped: str) -> dict[str, list[Any]]:
    found = {}
    for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items():
        found[first] = [row for row in rows if row[0].rpartition(":")[2] not in dropped]
    return found


_Loader.yaml_implicit_resolvers = _resolvers("int", "float", "timestamp")
_Loader.add_implicit_resolver(_NUMBER, _DIGITS, list("-+.0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", _LETTER, list("yYnN"))
_Dumper.yaml_implicit_resolvers = _resolvers()
# What either reading would not take for text is quoted.
_Dumper.add_implicit_resolver("tag:yaml.org,2002:other", _DIGITS, list("-+.0123456789"))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:other", _LETTER, list("yYnN"))


def _number(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node).replace("_", "")
    if _INT.fullmatch(text):
        digits = re.sub(r"^([-+]?)0o?(?=[0-7])", r"\g<1>0o", text)
        return float(int(digits, 0))
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


def _written_number(dumper: _Dumper, value: float) -> yaml.ScalarNode:
    if math.isfinite(value) and value == int(value) and abs(value) < 1e21:
        return dumper.represent_int(int(value))
    return dumper.represent_float(value)


def _boolean(loader: _Loader, node: yaml.ScalarNode) -> bool:
    return str(loader.construct_scalar(node)).lower() in ("y", "yes", "true", "on")


_Loader.add_constructor(_NUMBER, _number)
_Loader.add_constructor("tag:yaml.org,2002:bool", _boolean)
_Dumper.add_representer(float, _written_number)


def load(text: str, source: str) -> Any:
    """One document."""
    documents = load_all(text, source)
    return documents[0] if documents else None


def load_all(text: str, source: str) -> list[Any]:
    """All documents, without those that are empty."""
    try:
        return [found for found in yaml.load_all(text, _Loader) if found is not None]
    except yaml.YAMLError as exc:
        raise Invalid(f"{source} is not YAML: {exc}") from exc


def dump(value: Any) -> str:
    """As YAML, without a line end: keys in order, and nothing folded."""
    text: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=False, width=math.inf, allow_unicode=True)
    return text.removesuffix("...\n").rstrip("\n")


def split(text: str) -> Iterator[str]:
    """The documents in a rendered template, as text."""
    for part in re.split(r"^---[ \t]*$", text, flags=re.MULTILINE):
        if part.strip():
            yield part.strip("\n")


def plain(value: Any) -> Any:
    """The same with whole numbers as such, for JSON."""
    if isinstance(value, dict):
        return {key: plain(found) for key, found in value.items()}
    if isinstance(value, list):
        return [plain(found) for found in value]
    return int(value) if isinstance(value, float) and math.isfinite(value) and value == int(value) else value


def shown(value: Any) -> str:
    """A value as Go prints it into a template."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, (str, int)):
        return str(value)
    raise Invalid("a template prints a list or a map", hint="use toYaml")


def _float(value: float) -> str:
    if (value and not 1e-4 <= abs(value) < 1e21) or not math.isfinite(value):
        return repr(value)
    digits = repr(value)
    if "e" in digits or abs(value) >= 1e6:  # from here on Go writes an exponent, unless more digits are needed
        mantissa, _, exponent = f"{value:e}".partition("e")
        for length in range(18):
            mantissa, _, exponent = f"{value:.{length}e}".partition("e")
            if float(f"{mantissa}e{exponent}") == value:
                break
        return f"{mantissa}e{exponent}"
    return digits.removesuffix(".0")
