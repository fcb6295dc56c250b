"""A trajectory as text for a terminal, turn by turn. No control character of what it shows gets there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from aenv.rl.trajectory import Call, Component, Failed, Generation, Scored, Trajectory
from aenv.rl.viewing import as_json, message_text, result_text, steps, tool_calls

NARROWEST = 40
MOST_LINES, MOST_CHARACTERS = 12, 1200
"""Of one text, unless all is wanted."""
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
"""What a terminal would obey, and what would change the order or hide a part of what is read."""
_STYLES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "cyan": 36}


def render(trajectory: Trajectory, *, colour: bool, width: int, full: bool) -> str:
    """All of an episode that a person would read. Long texts are cut unless ``full``."""
    return "\n".join(_Page(trajectory, colour=colour, width=width, full=full).lines()) + "\n"


def plain(text: object) -> str:
    """Text that a terminal only shows: control characters are spelled out, all but the ends of lines."""
    return _CONTROL.sub(_spelled, str(text).replace("\r\n", "\n").replace("\t", "    "))


def line(text: object) -> str:
    """The same, in one line."""
    return plain(text).replace("\n", " ")


def _spelled(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class _Page:
    """One episode on its way to lines. Every text goes through ``plain`` before it is styled."""

    def __init__(self, trajectory: Trajectory, *, colour: bool, width: int, full: bool) -> None:
        self._of = trajectory
        self._colour = colour
        self._width = max(width, NARROWEST)
        self._full = full

    def lines(self) -> Iterator[str]:
        yield from self._head()
        if self._of.task.instruction:
            yield from ("", self._styled("instruction", "bold"), *self._text(self._of.task.instruction))
        if self._of.observation is not None:
            yield from ("", self._styled("observation", "bold"), *self._value(self._of.observation))
        for heard, turn in steps(self._of):
            for place in heard:
                yield from self._message(place)
            if turn is not None:
                yield from self._turn(turn)
        last = message_text(self._of.messages[-1]) if self._of.messages else ""
        if self._of.answer not in (None, "", last):
            yield from ("", self._styled("answer", "bold"), *self._value(self._of.answer))

    # The head

    def _head(self) -> Iterator[str]:
        of = self._of
        yield f"{self._styled(line(of.env), 'bold')}  {self._styled(line(of.id), 'dim')}"
        for name, value in self._facts():
            first, *more = self._wrapped(value, self._width - 14) or [""]
            colour = ("green" if of.ok else "red") if name == "outcome" else ""
            yield f"  {self._styled(name.ljust(10), 'dim')}  {self._styled(first, colour)}"
            yield from (f"{'':14}{self._styled(part, colour)}" for part in more)

    def _facts(self) -> Iterator[tuple[str, str]]:
        of = self._of
        yield "task", line(of.task.id or "-")
        if of.group:
            yield "group", f"{line(of.group)}, sample {of.sample}"
        if of.seed is not None:
            yield "seed", str(of.seed)
        yield "outcome", _outcome(of.outcome)
        if isinstance(of.outcome, Failed) and of.outcome.hint:
            yield "hint", plain(of.outcome.hint)
        if of.ended is not None:
            yield "ended", of.ended
        if of.retried:
            yield "retried", "\n".join(plain(failed) for failed in of.retried)
        if of.seconds:
            yield "time", ", ".join(f"{line(name)} {seconds:.3g} s" for name, seconds in of.seconds.items())
        if provenance := _provenance(of):
            yield "provenance", "\n".join(f"{name} {value}" for name, value in provenance)
        if of.lineage is not None:
            yield "lineage", f"{line(of.lineage.relation)} from {line(of.lineage.parent)}"

    # What was said and done

    def _message(self, place: int) -> Iterator[str]:
        message = self._of.messages[place]
        said = message_text(message)
        if message.get("role") == "user" and said == self._of.task.instruction:  # it is above
            return
        yield from ("", self._styled(line(message.get("role", "message")), "bold"), *self._text(said))

    def _turn(self, number: int) -> Iterator[str]:
        turn = self._of.turns[number]
        facts = "" if turn.generation is None else _generated(turn.generation)
        yield from ("", f"{self._styled(f'turn {number + 1}', 'bold', 'cyan')}  {self._styled(facts, 'dim')}".rstrip())
        if turn.generation is not None and 0 <= turn.generation.message < len(self._of.messages):
            message = self._of.messages[turn.generation.message]
            yield from self._text(message_text(message))
            made = {call.id for call in turn.calls}
            for asked in tool_calls(message):
                if asked.id not in made:
                    yield self._styled(f"  {line(asked.name)} was asked for, and not called", "yellow")
                    yield from self._value(asked.arguments, 4)
        for call in turn.calls:
            yield from self._call(call)
        for name, component in turn.rewards.items():
            yield self._styled(f"  reward {line(name)} {_weighed(component)}", "green")

    def _call(self, call: Call) -> Iterator[str]:
        named = line(call.id) if call.id else ""
        facts = f"{call.seconds:.3g} s at {call.at:.3g} s {named}".rstrip()
        yield f"  {self._styled('> ' + line(call.name), 'bold')}  {self._styled(facts, 'dim')}"
        yield from self._value(call.arguments, 4)
        if call.result is None:
            yield self._styled("  < no result", "red")
            return
        error = call.result.is_error
        yield self._styled("  < error" if error else "  <", "red" if error else "dim")
        structured = call.result.structured
        yield from self._value(structured if isinstance(structured, dict) else result_text(call.result), 4)

    # Texts

    def _value(self, value: Any, indent: int = 2) -> Iterator[str]:
        """A JSON value; the texts of an object as they are, since escaped ones cannot be read."""
        if not isinstance(value, Mapping):
            yield from self._text(value if isinstance(value, str) else as_json(value), indent)
            return
        for name, part in value.items():
            text = part if isinstance(part, str) else as_json(part)
            if "\n" in text or len(text) > self._width - indent - len(name) - 2:
                yield f"{'':{indent}}{self._styled(f'{line(name)}:', 'dim')}"
                yield from self._text(text, indent + 2)
            else:
                yield f"{'':{indent}}{self._styled(f'{line(name)}:', 'dim')} {plain(text)}"

    def _text(self, text: str, indent: int = 2) -> Iterator[str]:
        text, left = (text, 0) if self._full else _cut(text)
        yield from (f"{'':{indent}}{part}" for part in self._wrapped(plain(text).rstrip("\n"), self._width - indent))
        if left:
            yield f"{'':{indent}}{self._styled(f'... and {left:,} more characters', 'dim')}"

    def _wrapped(self, text: str, width: int) -> list[str]:
        return [piece for part in text.split("\n") for piece in _folded(part, max(width, 20))] if text else []

    def _styled(self, text: str, *styles: str) -> str:
        codes = ";".join(str(_STYLES[style]) for style in styles if style)
        return f"\x1b[{codes}m{text}\x1b[0m" if self._colour and codes and text else text


def _folded(text: str, width: int) -> Iterator[str]:
    """A line in pieces of that width, between words where there are any. Nothing of it is lost but the space there."""
    begin = 0
    while len(text) - begin > width:
        space = text.rfind(" ", begin + width // 2, begin + width + 1)
        end = space if space > begin else begin + width
        yield text[begin:end]
        begin = end + (end == space)
    yield text[begin:]


def _cut(text: str) -> tuple[str, int]:
    """A text that is short enough, and how many characters were left out."""
    kept = "\n".join(text[: MOST_CHARACTERS + 1].split("\n")[:MOST_LINES])[:MOST_CHARACTERS]
    left = len(text) - len(kept)
    return (kept, left) if left > 1 else (text, 0)


def _outcome(outcome: Scored | Failed) -> str:
    if isinstance(outcome, Failed):
        turn = "" if outcome.turn is None else f" in turn {outcome.turn + 1}"
        return plain(f"failed: {outcome.kind} during {outcome.phase}{turn}\n{outcome.reason}")
    parts = [f"{line(name)} {_weighed(component)}" for name, component in outcome.components.items()]
    return "\n".join([f"scored {outcome.score:g}", *parts])


def _weighed(component: Component) -> str:
    weight = "" if component.weight == 1 else f" x {component.weight:g}"
    details = "" if component.details is None else f" {line(as_json(component.details)[:200])}"
    return f"{component.score:g}{weight}{details}"


def _generated(generation: Generation) -> str:
    tokens = (generation.prompt_tokens, generation.completion_tokens)
    counted = "" if tokens == (None, None) else "tokens {} + {}".format(*("?" if n is None else n for n in tokens))
    facts = (generation.model, f"{generation.seconds:.3g} s", counted, generation.finish_reason)
    return line(", ".join(fact for fact in facts if fact))


def _provenance(trajectory: Trajectory) -> list[tuple[str, str]]:
    found = msgspec.structs.asdict(trajectory.provenance)
    found["versions"] = [f"{name} {version}" for name, version in found["versions"].items()]
    told = {name: ", ".join(map(str, value)) if isinstance(value, list) else value for name, value in found.items()}
    return [(name.replace("_", " "), line(value)) for name, value in told.items() if value]
