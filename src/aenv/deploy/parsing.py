"""A chart's template as a tree: the part of Go's template language that our chart is written in.

Values and fields, literals, variables, pipelines and parentheses; ``if``/``else if``/``else``, ``range``, ``with``,
``define`` and ``template``; comments, and the trimming of white space with ``{{-`` and ``-}}``. Nothing else of the
language: no ``block``, no ``break``, no other numbers than whole ones. What is not known is an error, never text.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple, NoReturn

from msgspec import Struct

from aenv.errors import Invalid

_ACTION = re.compile(
    r"\{\{(?P<left>-(?=\s))?\s*(?:(?P<comment>/\*.*?\*/)|(?P<body>(?:\"(?:\\.|[^\"\\])*\"|`[^`]*`|(?!-?\}\}).)*?))"
    r"(?P<right>(?:(?<=\s)|(?<=\*/)\s+)-)?\s*\}\}",
    re.DOTALL,
)
_TOKEN = re.compile(
    r"\s*(?:(?P<string>\"(?:\\.|[^\"\\])*\"|`[^`]*`)|(?P<number>-?\d+(?![\w.]))|(?P<field>\.[A-Za-z_]\w*)|(?P<dot>\.)"
    r"|(?P<variable>\$\w*)|(?P<name>[A-Za-z_]\w*)|(?P<mark>:=|=|\||\(|\)|,))"
)
_SPACE = re.compile(r"\s")
_CONSTANTS = {"true": True, "false": False, "nil": None}


class Text(Struct, frozen=True):
    text: str


class Literal(Struct, frozen=True):
    value: Any


class Dot(Struct, frozen=True):
    """``.``"""


class Variable(Struct, frozen=True):
    name: str


class Call(Struct, frozen=True):
    """A function by its name."""

    name: str


class Field(Struct, frozen=True):
    of: Any
    name: str


class Command(Struct, frozen=True):
    """A value alone, or what is called with its arguments."""

    parts: list[Any]


class Pipe(Struct, frozen=True):
    """Commands, each of which gets the last one's value as its last argument."""

    commands: list[Command]


class Show(Struct, frozen=True):
    line: int
    pipe: Pipe


class Assign(Struct, frozen=True):
    line: int
    name: str
    pipe: Pipe
    declare: bool


class Include(Struct, frozen=True):
    """``{{ template "name" value }}``"""

    line: int
    name: str
    pipe: Pipe | None


class Branch(Struct, frozen=True):
    """``if``, ``with`` and ``range``; ``names`` are the variables that it declares."""

    line: int
    kind: str
    names: list[str]
    pipe: Pipe
    body: list[Any]
    otherwise: list[Any]


class Parsed(NamedTuple):
    body: list[Any]
    defined: dict[str, list[Any]]


def parse(source: str, text: str) -> Parsed:
    """The tree of a template, and those that it defines; ``source`` is what errors call it."""
    parser = _Parser(source, text)
    body, _ = parser.block(top=True)
    return Parsed(body, parser.defined)


class _Parser:
    def __init__(self, source: str, text: str) -> None:
        self._source = source
        self._pieces = list(self._cut(text))
        self._at = 0
        self.defined: dict[str, list[Any]] = {}

    def _cut(self, text: str) -> list[tuple[int, str, bool]]:
        """Line, text, and whether it is an action, in turn."""
        pieces: list[tuple[int, str, bool]] = []
        position, line, trim = 0, 1, False
        while True:
            found = _ACTION.search(text, position)
            plain = text[position : found.start() if found else len(text)]
            if "{{" in plain:
                self._line = line + text[position : position + plain.index("{{")].count("\n")
                self._fail("an action does not end")
            shown = plain.lstrip() if trim else plain
            if found and found["left"]:
                shown = shown.rstrip()
            if shown:
                pieces.append((line, shown, False))
            if not found:
                return pieces
            line += plain.count("\n")
            if not found["comment"]:
                pieces.append((line, found["body"].strip(), True))
            line += found[0].count("\n")
            position, trim = found.end(), bool(found["right"])

    def block(self, *, top: bool = False) -> tuple[list[Any], str]:
        """Nodes up to an ``end`` or ``else``, and which of them it was, with what follows it."""
        nodes: list[Any] = []
        while self._at < len(self._pieces):
            self._line, text, action = self._pieces[self._at]
            self._at += 1
            if not action:
                nodes.append(Text(text))
                continue
            word = text.split(None, 1)[0] if text else ""
            if word in ("end", "else") and not top:
                return nodes, text
            if word == "define":
                self._define(text)
            elif word in ("if", "with", "range"):
                nodes.append(self._branch(word, text[len(word) :]))
            else:
                nodes.append(self._plain(text))
        if not top:
            self._fail("an 'end' is missing")
        return nodes, ""

    def _define(self, text: str) -> None:
        line = self._line
        [_, name, *more] = [*self._tokens(text), ("", ""), ("", "")][:3]
        if name[0] != "string" or more[0][0]:
            self._fail("a definition has a name in quotes, and nothing more")
        body, end = self.block()
        if end != "end":
            self._line = line
            self._fail("a definition ends with 'end'")
        self.defined[_unquoted(name[1])] = body

    def _branch(self, kind: str, text: str) -> Branch:
        line = self._line
        tokens = self._tokens(text)
        names = []
        marks = [index for index, token in enumerate(tokens) if token == ("mark", ":=")]
        if marks:
            names = [value for what, value in tokens[: marks[0]] if what == "variable"]
            tokens = tokens[marks[0] + 1 :]
        pipe = self._pipe(tokens)
        body, end = self.block()
        otherwise: list[Any] = []
        if end.startswith("else"):
            rest = end[4:].strip()
            if rest:
                word = rest.split(None, 1)[0]
                if word != kind or kind == "range":
                    self._fail(f"'else {word}' does not go with {kind!r}")
                otherwise = [self._branch(kind, rest[len(word) :])]
            else:
                otherwise, end = self.block()
                if end != "end":
                    self._fail("an 'else' comes after 'else'")
        return Branch(line, kind, names, pipe, body, otherwise)

    def _plain(self, text: str) -> Show | Assign | Include:
        tokens = self._tokens(text)
        if not tokens:
            self._fail("an action is empty")
        if len(tokens) > 1 and tokens[0][0] == "variable" and tokens[1] in (("mark", ":="), ("mark", "=")):
            return Assign(self._line, tokens[0][1], self._pipe(tokens[2:]), tokens[1][1] == ":=")
        if tokens[0] == ("name", "template"):
            if len(tokens) < 2 or tokens[1][0] != "string":
                self._fail("'template' needs a name in quotes")
            return Include(self._line, _unquoted(tokens[1][1]), self._pipe(tokens[2:]) if tokens[2:] else None)
        return Show(self._line, self._pipe(tokens))

    def _tokens(self, text: str) -> list[tuple[str, str]]:
        """What it is made of. A field that follows a space is one of the dot, and none of what is before it."""
        tokens: list[tuple[str, str]] = []
        position, text = 0, text.rstrip()
        while position < len(text):
            found = _TOKEN.match(text, position)
            if found is None:
                self._fail(f"{text[position:].split()[0]!r} is not understood")
            kind = found.lastgroup or ""
            if kind == "field" and (not tokens or _SPACE.match(text, position) or text[position - 1] in "(|=,"):
                tokens.append(("dot", "."))
            tokens.append((kind, found[kind]))
            position = found.end()
        return tokens

    def _pipe(self, tokens: list[tuple[str, str]]) -> Pipe:
        pipe, rest = self._commands(tokens)
        if rest:
            self._fail(f"{rest[0][1]!r} is not understood here")
        return pipe

    def _commands(self, tokens: list[tuple[str, str]]) -> tuple[Pipe, list[tuple[str, str]]]:
        commands: list[Command] = []
        while True:
            parts: list[Any] = []
            while tokens and tokens[0] not in (("mark", "|"), ("mark", ")")):
                part, tokens = self._operand(tokens)
                parts.append(part)
            if not parts:
                self._fail("a value is missing")
            commands.append(Command(parts))
            if not tokens or tokens[0][1] != "|":
                return Pipe(commands), tokens
            tokens = tokens[1:]

    def _operand(self, tokens: list[tuple[str, str]]) -> tuple[Any, list[tuple[str, str]]]:
        (kind, value), tokens = tokens[0], tokens[1:]
        node: Any
        if kind == "string":
            node = Literal(_unquoted(value))
        elif kind == "number":
            node = Literal(int(value))
        elif kind == "dot":
            node = Dot()
        elif kind == "variable":
            node = Variable(value)
        elif kind == "name":
            node = Literal(_CONSTANTS[value]) if value in _CONSTANTS else Call(value)
        elif value == "(":
            node, tokens = self._commands(tokens)
            if not tokens or tokens[0] != ("mark", ")"):
                self._fail("a ')' is missing")
            tokens = tokens[1:]
        else:
            self._fail(f"{value!r} is not understood here")
        while tokens and tokens[0][0] == "field":
            node = Field(node, tokens[0][1][1:])
            tokens = tokens[1:]
        return node, tokens

    def _fail(self, why: str) -> NoReturn:
        raise Invalid(f"{self._source}, line {self._line}: {why}", hint="see aenv/deploy/parsing.py for what there is")


def _unquoted(text: str) -> str:
    return text[1:-1] if text[0] == "`" else str(json.loads(text, strict=False))
