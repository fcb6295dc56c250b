"""Which conversations there are, what each one offers when, and how its authors answer it."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from bfcl_eval.constants.category_mapping import MULTI_TURN_CATEGORY, VERSION_PREFIX
from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING, MULTI_TURN_FUNC_DOC_FILE_MAPPING

from aenv.errors import Invalid, did_you_mean

ALL = "all"
_PREFIX = "multi_turn_"
_DATA = files("bfcl_eval") / "data"
_JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}
"""Types of the benchmark's function docs that JSON Schema calls otherwise."""


class Entry(NamedTuple):
    """One conversation of the benchmark."""

    category: str
    data: dict[str, Any]
    """As the benchmark has it."""
    truth: list[list[str]]
    """The calls that its authors make in each turn."""

    @property
    def id(self) -> str:
        found: str = self.data["id"]
        return found

    @property
    def classes(self) -> list[str]:
        found: list[str] = self.data["involved_classes"]
        return found

    @property
    def is_long(self) -> bool:
        return "long_context" in self.category

    @property
    def added(self) -> dict[int, list[str]]:
        """Functions that are held back until a turn, by the number of that turn."""
        held = self.data.get("missed_function", {})
        return {int(turn): names for turn, names in held.items()}

    @property
    def offered(self) -> list[str]:
        """Functions that there are from the beginning."""
        held = {name for names in self.added.values() for name in names}
        return [name for class_ in self.classes for name in DOCS[class_] if name not in held]

    @property
    def early(self) -> set[str]:
        """Functions that its authors use before they are added, as one conversation has it: they cannot be refused."""
        return {name for turn, names in self.added.items() for name in names if name in self._used(turn)}

    def _used(self, before: int) -> set[str]:
        return {name for turn in range(before) for name, _ in calls(self, turn)}

    def said(self, turn: int) -> str:
        """The user's words in a turn; empty where the turn only brings more functions."""
        return "\n".join(message["content"] for message in self.data["question"][turn])


def _lines(*path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _DATA.joinpath(*path).read_text(encoding="utf-8").splitlines()]


def _entries() -> dict[str, Entry]:
    found = {}
    for category in MULTI_TURN_CATEGORY:
        file = f"{VERSION_PREFIX}_{category}.json"
        truths = {answer["id"]: answer["ground_truth"] for answer in _lines("possible_answer", file)}
        found.update({data["id"]: Entry(category, data, truths[data["id"]]) for data in _lines(file)})
    return found


ENTRIES = _entries()
DOCS: dict[str, dict[str, dict[str, Any]]] = {
    class_: {doc["name"]: doc for doc in _lines("multi_turn_func_doc", MULTI_TURN_FUNC_DOC_FILE_MAPPING[class_])}
    for class_ in sorted({class_ for entry in ENTRIES.values() for class_ in entry.classes})
}
"""The benchmark's documentation of its functions, by class and by name. No two classes document the same name."""
FUNCTIONS = {name: doc for docs in DOCS.values() for name, doc in docs.items()}
CLASSES = {
    class_: getattr(importlib.import_module(CLASS_FILE_PATH_MAPPING[class_]), class_)  # imported before instances fork
    for class_ in DOCS
}


def choose(domain: str) -> list[Entry]:
    """The conversations of a category, with or without ``multi_turn_`` before its name, or all of them."""
    if domain == ALL:
        return list(ENTRIES.values())
    category = domain if domain.startswith(_PREFIX) else _PREFIX + domain
    if category not in MULTI_TURN_CATEGORY:
        known = [name.removeprefix(_PREFIX) for name in MULTI_TURN_CATEGORY]
        raise Invalid(f"BFCL has no multi-turn category {domain!r}", hint=did_you_mean(domain, [*known, ALL]))
    return [entry for entry in ENTRIES.values() if entry.category == category]


def find(task: str) -> Entry:
    """The conversation of this id."""
    if task not in ENTRIES:
        raise Invalid(f"BFCL has no conversation {task!r}", hint=did_you_mean(task, ENTRIES))
    return ENTRIES[task]


def description(name: str) -> str:
    """What a model is told of a function: as the benchmark does, with what it answers."""
    doc = FUNCTIONS[name]
    return f"{doc['description']} The response field has the following schema: {json.dumps(doc['response'])}"


def schema(doc: dict[str, Any]) -> dict[str, Any]:
    """A type of the benchmark's docs as JSON Schema."""
    found = {}
    for key, value in doc.items():
        if key == "type":
            named = _JSON_TYPES.get(value, value)
            found |= {} if named is None else {"type": named}
        elif key == "properties":
            found[key] = {name: schema(part) for name, part in value.items()}
        else:
            found[key] = schema(value) if key == "items" else value
    return found


def calls(entry: Entry, turn: int) -> list[tuple[str, dict[str, Any]]]:
    """The calls that the benchmark's authors make in a turn: names, and arguments by name."""
    return [_call(text) for text in entry.truth[turn]]


def _call(text: str) -> tuple[str, dict[str, Any]]:
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    given = [ast.literal_eval(value) for value in call.args]
    named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    return call.func.id, {**dict(zip(_parameters(call.func.id), given, strict=False)), **named}


@cache
def _parameters(name: str) -> list[str]:
    class_ = next(class_ for class_, docs in DOCS.items() if name in docs)
    _self, *found = inspect.signature(getattr(CLASSES[class_], name)).parameters
    return found
