"""An agent that knows nothing of an environment and tries everything: every tool, with arguments drawn by its schema.

What it draws follows from a seed and the schemas alone, so two of its episodes can be compared.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aenv.comparing import unlike, unlike_results
from aenv.errors import AuthorError, Invalid, NotFound
from aenv.rl.comparing import Difference
from aenv.rl.recording import Episode
from aenv.rl.replaying import reward_names
from aenv.rl.rewards import Reward
from aenv.rl.rules import Rules
from aenv.rl.tasks import Task
from aenv.rl.trajectory import Trajectory

TIMES = 3
"""How often each tool is called."""
PATIENCE = 20.0
"""Seconds that a call may take."""
RULES = Rules(rewards=Reward(name="none", function=lambda _: 0.0))
"""The agent takes the rewards itself, as far as they can be taken: an environment without one can be tried, too."""
_DEEPEST = 4
"""Objects in objects, after which only what is required is drawn."""
_WORDS = ("alpha", "bravo", "charlie", "delta", "echo", "foxtrot")
_FORMATS = {
    "date": "2026-01-01",
    "date-time": "2026-01-01T00:00:00Z",
    "time": "00:00:00Z",
    "duration": "P1D",
    "email": "ada@example.org",
    "hostname": "example.org",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.org/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}


async def exercise(env: Episode, task: Task) -> dict[str, Any]:
    """Call every tool a few times, then take the rewards that need no arguments; what these gave, by name."""
    drawn = random.Random(env.sample_seed)  # noqa: S311
    tools = await env.list_tools()
    for _ in range(TIMES):
        for tool in tools:
            name = str(tool["name"]).rsplit("/", 1)[-1]
            await env.call_tool(name, Drawing(tool["inputSchema"], drawn).arguments(), PATIENCE)
    taken: dict[str, Any] = {}
    for name in await reward_names(env):
        try:
            taken[name] = await env.call_reward(None, name)
        except (Invalid, NotFound):  # it needs arguments, which nobody knows here
            continue
        except AuthorError as exc:
            taken[name] = str(exc)
    return taken


def differing(first: Trajectory, second: Trajectory) -> Difference | None:
    """Where two episodes of this agent differ first."""
    tools = first.provenance.tools_digest, second.provenance.tools_digest
    if tools[0] != tools[1]:
        return Difference(what="observation", name="tools", expected=tools[0], found=tools[1])
    if different := unlike(first.observation, second.observation):
        return Difference(what="observation", name="reset", **different._asdict())
    for step, (one, other) in enumerate(zip(first.calls, second.calls, strict=False)):
        before = (one.name, one.arguments)
        if different := unlike(before, (other.name, other.arguments)):
            return Difference(what="call", name=one.name, step=step, turn=step, **different._asdict())
        if one.result is None or other.result is None:
            continue
        if different := unlike_results(one.result, other.result):
            return Difference(what="observation", name=one.name, step=step, turn=step, **different._asdict())
    for name in {**first.answer, **second.answer}:
        if different := unlike(first.answer.get(name), second.answer.get(name)):
            return Difference(what="reward", name=name, **different._asdict())
    return None


class Drawing:
    """Values that a JSON schema allows, drawn from a generator. What it cannot do, such as a pattern, it leaves out:
    then the environment refuses the value, and that is an observation, too."""

    def __init__(self, schema: Mapping[str, Any], drawn: random.Random) -> None:
        self._root = schema
        self._drawn = drawn

    def arguments(self) -> dict[str, Any]:
        """For a tool that has this schema."""
        return self._object(self._root, 0)

    def _value(self, schema: Any, depth: int) -> Any:
        if not isinstance(schema, Mapping):  # true allows anything
            return self._drawn.choice(_WORDS)
        schema = self._resolved(schema)
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return self._drawn.choice(schema["enum"])
        if "default" in schema and self._drawn.random() < 0.5:
            return schema["default"]
        for several in ("anyOf", "oneOf"):
            if schema.get(several):
                return self._value(self._drawn.choice(schema[several]), depth)
        return self._typed(_type(schema, self._drawn), schema, depth)

    def _resolved(self, schema: Mapping[str, Any], depth: int = 0) -> Mapping[str, Any]:
        """With what it refers to, and all that it must be at the same time."""
        parts = [*([self._at(str(schema["$ref"]))] if "$ref" in schema else []), *(schema.get("allOf") or ())]
        if not parts or depth > _DEEPEST:
            return schema
        found: Mapping[str, Any] = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
        for part in parts:
            if isinstance(part, Mapping):
                found = _both(self._resolved(part, depth + 1), found)
        return found

    def _at(self, reference: str) -> Any:
        found: Any = self._root
        for part in reference.removeprefix("#").strip("/").split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            found = found.get(key, {}) if isinstance(found, Mapping) else {}
        return found

    def _typed(self, kind: str, schema: Mapping[str, Any], depth: int) -> Any:
        if kind == "object":
            return self._object(schema, depth)
        if kind == "array":
            return self._array(schema, depth)
        if kind == "string":
            return self._string(schema)
        if kind in ("integer", "number"):
            return self._number(schema, kind)
        return None if kind == "null" else self._drawn.random() < 0.5

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        required = schema.get("required") or ()
        found = {}
        for name, of in (schema.get("properties") or {}).items():
            is_wanted = self._drawn.random() < 0.5 and depth < _DEEPEST
            if name in required or is_wanted:
                found[name] = self._value(of, depth + 1)
        return found

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        least = int(schema.get("minItems") or 0)
        most = min(int(schema.get("maxItems", least + 3)), least + 3) if depth < _DEEPEST else least
        first: Sequence[Any] = schema.get("prefixItems") or ()
        size = max(self._drawn.randint(least, max(least, most)), min(len(first), most))
        found: list[Any] = []
        for place in range(size):
            value = self._value(first[place] if place < len(first) else schema.get("items", {}), depth + 1)
            if not schema.get("uniqueItems") or value not in found:
                found.append(value)
        return found

    def _string(self, schema: Mapping[str, Any]) -> str:
        if schema.get("format") in _FORMATS:
            return _FORMATS[schema["format"]]
        text = self._drawn.choice(_WORDS)
        least = int(schema.get("minLength") or 0)
        text += "".join(self._drawn.choice(string.ascii_lowercase) for _ in range(least - len(text)))
        return text[: int(schema.get("maxLength", len(text)))]

    def _number(self, schema: Mapping[str, Any], kind: str) -> float:
        step = schema.get("multipleOf") or (1 if kind == "integer" else 0)
        margin = step or 1e-3
        least = _tightest(max, schema.get("minimum"), schema.get("exclusiveMinimum"), margin)
        most = _tightest(min, schema.get("maximum"), schema.get("exclusiveMaximum"), -margin)
        if least is None:
            least = 0.0 if most is None else min(0.0, most - 10)
        if most is None:
            most = least + 10
        if not step:
            return round(self._drawn.uniform(least, most), 3)
        lowest = math.ceil(least / step)
        found = self._drawn.randint(lowest, max(math.floor(most / step), lowest)) * step
        return int(found) if kind == "integer" else found


def _both(one: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    """What one schema says, and the other; of bounds, what the other says."""
    found = {**one, **other}
    if "properties" in one and "properties" in other:
        found["properties"] = {**one["properties"], **other["properties"]}
    if "required" in one and "required" in other:
        found["required"] = [*one["required"], *other["required"]]
    return found


def _tightest(
    choose: Callable[[list[float]], float], within: float | None, beyond: float | None, margin: float
) -> float | None:
    """The bound that counts, of one that may be reached and one that may not."""
    bounds = [*([] if within is None else [within]), *([] if beyond is None else [beyond + margin])]
    return choose(bounds) if bounds else None


def _type(schema: Mapping[str, Any], drawn: random.Random) -> str:
    kind = schema.get("type")
    if isinstance(kind, list) and kind:
        kind = drawn.choice(kind)
    if isinstance(kind, str):
        return kind
    if "properties" in schema:
        return "object"
    return "array" if "items" in schema else "string"
