"""The errors: the tree in the docstring is the tree of classes, and each survives the wire."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

import pytest

from aenv import errors
from aenv.errors import AEnvError, from_wire

CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, AEnvError) and value.__name__ == name
}
DRAWN = re.findall(r"^( +)(\w+) +(?:([a-z_]+) +(\d{3})|code +http)\b", errors.__doc__ or "", re.MULTILINE)


def test_the_drawing_has_every_class_in_its_place() -> None:
    parents: list[str] = []
    drawn = {}
    for indent, name, _, _ in DRAWN:
        depth = (len(indent) - 4) // 2
        parents[depth:] = [name]
        drawn[name] = parents[depth - 1] if depth else "Exception"
    assert drawn == {name: cls.__base__.__name__ for name, cls in CLASSES.items() if cls.__base__}


@pytest.mark.parametrize(("name", "code", "status"), [(name, code, status) for _, name, code, status in DRAWN if code])
def test_the_drawing_has_the_codes(name: str, code: str, status: str) -> None:
    assert (CLASSES[name].code, CLASSES[name].status) == (code, int(status))


def test_no_two_classes_share_a_code() -> None:
    codes = [cls.code for cls in CLASSES.values()]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("cls", CLASSES.values(), ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("hint", [None, "do this"])
def test_an_error_survives_the_wire(cls: type[AEnvError], hint: str | None) -> None:
    wire = json.loads(json.dumps(cls("what happened", hint=hint).to_wire()))
    found = from_wire(wire)
    assert type(found) is cls
    assert (found.message, found.hint, str(found)) == ("what happened", hint, "what happened")
    assert ("hint" in wire) is (hint is not None)


@pytest.mark.parametrize("cls", CLASSES.values(), ids=lambda cls: cls.__name__)
def test_one_base_class_catches_everything(cls: type[AEnvError]) -> None:
    with pytest.raises(AEnvError) as caught:
        raise cls("x")
    assert caught.value.args == ("x",)


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        ({"code": "from_the_future", "message": "m"}, "m"),
        ({"message": "m"}, "m"),
        ({"code": None, "message": 5}, "5"),
        ({"code": ["x"]}, "unknown error"),
        ({}, "unknown error"),
    ],
)
def test_an_unknown_code_is_a_plain_error(wire: dict[str, Any], message: str) -> None:
    found = from_wire(wire)
    assert type(found) is AEnvError
    assert found.message == message


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("EnvironmentError", "SandboxError"),
        ("UnrecoverableEnvironmentError", "SandboxLost"),
        ("ToolTimeoutError", "CallTimeout"),
    ],
)
def test_older_names_are_the_same_classes(alias: str, name: str) -> None:
    assert getattr(errors, alias) is CLASSES[name]
