"""The score of an answer, by its dataset's own scorer, in a fork that may take only so long.

Nine scorers evaluate the answer as Python or by SymPy, which would run whatever it says. Answers to those are looked at
first: what is no literal and no formula is not scored.
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import os
import re
import resource
import select
import signal
from contextlib import suppress
from typing import NamedTuple

import sympy
from reasoning_gym.dataset import ProceduralDataset

from reasoning.generating import Entry

TIME_LIMIT = 10.0
"""Seconds for one scorer."""
_MEMORY = 1024**3
"""Bytes that one may take beyond what there is."""
LITERALS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Whose scorers call ``eval`` on the answer."""
FORMULAS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Whose scorers have SymPy parse the answer, which calls ``eval`` on it."""
_FUNCTIONS = ("Abs", "abs", "acos", "asin", "atan", "cos", "cosh", "cot", "csc", "erf", "exp", "factorial", "ln", "log")
_NO_LITERAL = (ast.Call, ast.Attribute, ast.Lambda, ast.comprehension, ast.NamedExpr, ast.JoinedStr)
_IN_FORMULAS = frozenset({*_FUNCTIONS, "sec", "sin", "sinh", "sqrt", "tan", "tanh", "pi", "E", "I"})


class Scored(NamedTuple):
    """What a scorer said, or why there is nothing that it said."""

    score: float | None
    reason: str


def score(name: str, dataset: ProceduralDataset, answer: str, entry: Entry) -> Scored:
    """The score of an answer. ``RuntimeError`` when the scorer cannot score the dataset's own answer either."""
    if why := _program(name, answer):
        return Scored(None, why)
    found = _forked(dataset, answer, entry)
    own = entry["answer"]
    if found.score is None and isinstance(own, str) and (broken := _forked(dataset, own, entry)).score is None:
        raise RuntimeError(f"the scorer of {name} does not take its own answer: {broken.reason}")
    return found


def _is_variable(node: ast.AST) -> bool:
    """Whether it may be one of the scorer's, which has gold in one. Answers may be words, but in capitals."""
    return isinstance(node, ast.Name) and not node.id.isupper()


def _program(name: str, answer: str) -> str:
    """Why an answer is more than a scorer that evaluates it may see; empty when it is not."""
    if name in LITERALS:
        try:
            found = ast.walk(ast.parse(answer.strip(), mode="eval"))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return ""  # eval takes no more of it than this
        if any(isinstance(node, _NO_LITERAL) or _is_variable(node) for node in found):
            return "the answer is a program, and a literal is expected"
    if name in FORMULAS:
        if re.search(r"['\"`\\{}\[\]:;@#=\n]|__|\.\s*[^\W\d]", answer.strip()):
            return "the answer is more than a formula"
        for word in re.findall(r"[^\W\d]\w*", answer):
            if word not in _IN_FORMULAS and (hasattr(builtins, word) or callable(getattr(sympy, word, None))):
                return f"the answer is more than a formula: it uses {word[:50]}"
    return ""


def _forked(dataset: ProceduralDataset, answer: str, entry: Entry) -> Scored:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps(_asked(dataset, answer, entry)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    try:
        if not select.select([reading], [], [], TIME_LIMIT)[0]:
            return Scored(None, f"the scorer took longer than {TIME_LIMIT:g} s")
        told = os.read(reading, 65536)
    finally:
        os.close(reading)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return Scored(*json.loads(told)) if told else Scored(None, "the scorer's process ended")


def _asked(dataset: ProceduralDataset, answer: str, entry: Entry) -> tuple[float | None, str]:
    try:
        with open("/proc/self/statm", encoding="ascii") as told:
            most = int(told.read().split()[0]) * resource.getpagesize() + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    except (OSError, ValueError):
        pass  # the sandbox has its own limit
    try:
        found = float(dataset.score_answer(answer=answer, entry=entry))
    except BaseException as exc:
        return None, f"the scorer raised {type(exc).__name__}: {exc}"[:500]
    return (found, "") if math.isfinite(found) else (None, f"the scorer said {found}")
