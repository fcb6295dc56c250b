"""Makes tasks from packages with tests of their own: ``python make_tasks.py TARGET``.

Sdists are fetched by pip. A task is a small bug, made by one change of the syntax in one function, that fails some
tests of one file and passes others; the patch that takes it back is the gold. The same sdists give the same tasks.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))
from with_rows import judged, make

TIME = 30
"""Seconds that the tests of one file may take."""
TRIED = 40
"""Changes that are tried in one module."""
_COMPARED = {"Lt": "<=", "LtE": "<", "Gt": ">=", "GtE": ">", "Eq": "!=", "NotEq": "==", "In": "not in", "NotIn": "in"}
_ISSUE = """`{function}` in `{module}` does not do what it should.

It worked before; some of its tests fail now. Find out what is wrong with it, and put it right.
"""


class Package(NamedTuple):
    """An sdist that needs nothing but pytest, and the files of it that are changed and tested."""

    requirement: str
    pairs: list[tuple[str, str]]
    """A module, and the file of its tests."""
    source: str = ""
    """The directory that modules are imported from, when it is not the root."""


PACKAGES = [
    Package(
        "toolz==1.0.0",
        [
            ("toolz/itertoolz.py", "toolz/tests/test_itertoolz.py"),
            ("toolz/dicttoolz.py", "toolz/tests/test_dicttoolz.py"),
        ],
    ),
    Package("cachetools==5.5.0", [("src/cachetools/__init__.py", "tests/test_lru.py")], "src"),
    Package("inflection==0.5.1", [("inflection/__init__.py", "test_inflection.py")]),
    Package("more-itertools==10.5.0", [("more_itertools/recipes.py", "tests/test_recipes.py")]),
    Package("parse==1.20.2", [("parse.py", "tests/test_parse.py")]),
]


class Mutant(NamedTuple):
    """A module with a bug in it."""

    function: str
    text: str


class Change(NamedTuple):
    """What was done to a module."""

    module: str
    mutant: Mutant
    before: str


def mutants(text: str, seed: str) -> Iterator[Mutant]:
    """Modules that differ from this one in one place each, in an order that the seed decides."""
    found = [
        (function.name, place)
        for function in ast.walk(ast.parse(text))
        if isinstance(function, ast.FunctionDef) and not function.name.startswith("__")
        for place in _places(function)
    ]
    random.Random(seed).shuffle(found)  # noqa: S311
    lines = text.encode().splitlines(keepends=True)
    for name, (line, start, end, new) in found:
        changed = lines[line - 1][:start] + new.encode() + lines[line - 1][end:]
        yield Mutant(name, b"".join([*lines[: line - 1], changed, *lines[line:]]).decode())


def _places(function: ast.FunctionDef) -> Iterator[tuple[int, int, int, str]]:
    """What can be changed: the line, from where to where in its bytes, and the text that takes its place."""
    for node in ast.walk(function):
        if not hasattr(node, "lineno") or node.lineno != node.end_lineno:
            continue
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op).__name__ in _COMPARED:
                yield node.lineno, left.end_col_offset or 0, right.col_offset, f" {_COMPARED[type(op).__name__]} "
            case ast.Constant(value=int(value)) if not isinstance(value, bool) and value < 100:
                yield node.lineno, node.col_offset, node.end_col_offset or 0, str(value + 1)
            case ast.Return(value=ast.expr() as value):
                yield node.lineno, value.col_offset, value.end_col_offset or 0, "None"
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                yield node.lineno, left.end_col_offset or 0, right.col_offset, " - "


def tasks_of(package: Package, sdist: Path, place: Path, each: int) -> Iterator[dict[str, Any]]:
    """Rows, and the checkout of each below ``place``."""
    name = package.requirement.partition("==")[0]
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        (root,) = Path(folder).iterdir()
        for module, tests in package.pairs:
            before = _run(root, package, tests)
            passing = {test for test, status in before.items() if status == "PASSED"}
            text = (root / module).read_text()
            made: set[str] = set()
            candidates = islice(mutants(text, f"{package.requirement} {module}"), TRIED)
            for mutant in candidates:
                if len(made) == each or mutant.function in made:
                    continue
                (root / module).write_text(mutant.text)
                after = _run(root, package, tests)
                broken = {test for test in passing if after.get(test) == "FAILED"}
                if broken and after.keys() == before.keys() and len(broken) < len(passing) / 2:
                    made.add(mutant.function)
                    task = f"{name}-{Path(module).stem.strip('_')}-{mutant.function.strip('_')}"
                    shutil.copytree(root, place / task, ignore=shutil.ignore_patterns("__pycache__", "docs"))
                    yield _row(task, package, Change(module, mutant, text), broken, passing - broken)
                (root / module).write_text(text)


def _row(task: str, package: Package, change: Change, broken: set[str], whole: set[str]) -> dict[str, Any]:
    name, _, version = package.requirement.partition("==")
    module, mutant, good = change
    gold = difflib.unified_diff(mutant.text.splitlines(True), good.splitlines(True), f"a/{module}", f"b/{module}")
    row = {
        "instance_id": task,
        "repo": name,
        "version": version,
        "base_commit": f"sdist-{version}",
        "patch": f"diff --git a/{module} b/{module}\n" + "".join(gold),
        "test_patch": "",
        "problem_statement": _ISSUE.format(function=mutant.function, module=module),
        "FAIL_TO_PASS": sorted(broken),
        "PASS_TO_PASS": sorted(whole),
    }
    path = f"env PYTHONPATH={package.source}:$PYTHONPATH " if package.source else ""
    return judged(row, f"{path}python -m pytest -rA -p no:cacheprovider -o addopts=", "parse_log_pytest")


def _run(root: Path, package: Package, tests: str) -> dict[str, str]:
    """The status of each test of a file; of none, where they do not end. Names with blanks are left out, since the
    parsers of the harness end a name there."""
    line = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "-o", "addopts=", "-q", tests]
    variables = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    variables["PYTHONPATH"] = str(root / package.source)
    try:
        done = subprocess.run(line, cwd=root, env=variables, capture_output=True, text=True, timeout=TIME, check=False)
    except subprocess.TimeoutExpired:
        return {}
    found = {}
    for printed in done.stdout.splitlines():
        status, _, rest = printed.partition(" ")
        test = rest.partition(" - ")[0]
        if status in ("PASSED", "FAILED") and "::" in test and " " not in test:
            found[test] = status
    return found


def fetch(packages: list[Package], cache: Path) -> dict[str, Path]:
    """The sdists, which pip fetches where they are not kept yet."""
    cache.mkdir(parents=True, exist_ok=True)
    found = {}
    for package in packages:
        name, _, version = package.requirement.partition("==")
        pattern = f"{name.replace('-', '[-_]')}-{version}.tar.gz"
        if not list(cache.glob(pattern)):
            line = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
            subprocess.run([*line, "-d", str(cache), package.requirement], check=True)
        (found[package.requirement],) = cache.glob(pattern)
    return found


def write(place: Path, cache: Path, packages: list[Package], each: int = 2) -> list[dict[str, Any]]:
    """Tasks of these packages: their rows, and a checkout for each below ``place``."""
    sdists = fetch(packages, cache)
    found = (tasks_of(package, sdists[package.requirement], place, each) for package in packages)
    return list(chain.from_iterable(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="where the project is made")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".aenv" / "sdists", help="where sdists are kept")
    parser.add_argument("--each", type=int, default=2, help="bugs in each module")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        rows = write(Path(place), given.cache, PACKAGES, given.each)
        make(rows, Path(place), given.target)


if __name__ == "__main__":
    main()
