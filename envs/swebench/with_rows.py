"""Makes a project of its own from rows of SWE-bench and checkouts: ``python with_rows.py ROWS CHECKOUTS TARGET``.

ROWS is a file with a JSON object on each line, or the name of a dataset, for the library ``datasets``. CHECKOUTS has a
directory for each row, named by its instance_id or by its field ``checkout``: the repository at the base commit.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
_MARK = "EOF_114329324912"


def load(source: str, split: str = "test") -> list[dict[str, Any]]:
    """Rows of a file, or of a dataset."""
    if Path(source).is_file():
        lines = Path(source).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines if line.strip()]
    from datasets import load_dataset  # only for those who name one

    return [dict(row) for row in load_dataset(source, split=split)]


def judged(row: Mapping[str, Any], command: str, parser: str) -> dict[str, Any]:
    """A row that says how it is judged, as those of swebench 5 do: the tests of its files, run by a command."""
    patch = row.get("test_patch") or ""
    patched = [line[6:].strip() for line in patch.splitlines() if line.startswith("+++ b/")]
    tests = row["FAIL_TO_PASS"]
    named = [test.partition("::")[0] for test in (json.loads(tests) if isinstance(tests, str) else tests)]
    files = " ".join(shlex.quote(name) for name in (patched or sorted(set(named))))
    restored = f"git checkout {row['base_commit']} {files}"
    applied = [f"git apply -v - <<'{_MARK}'", patch.rstrip("\n"), _MARK] if patch else []
    run = [f": '{START}'", f"{command} {files}", f": '{END}'"]
    lines = ["#!/bin/bash", "set -uxo pipefail", "cd /testbed", restored, *applied, *run, restored]
    return {**row, "log_parser": parser, "eval_type": "pass_and_fail", "eval_script": "\n".join(lines) + "\n"}


def make(rows: Iterable[Mapping[str, Any]], checkouts: Path, target: Path, packages: Path | None = None) -> None:
    """Write the project."""
    kept = shutil.ignore_patterns("repos", "rows.jsonl", "packages", "test", "__pycache__")
    shutil.copytree(HERE, target, ignore=kept)
    config = json.loads((target / "config.json").read_text())
    config["name"] = target.name
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    with open(target / "rows.jsonl", "w", encoding="utf-8") as file:
        for row in rows:
            name = row.get("checkout") or row["instance_id"]
            if (checkouts / name).is_dir() and not (target / "repos" / name).exists():
                copied = shutil.ignore_patterns(".git", "__pycache__", ".pytest_cache")
                shutil.copytree(checkouts / name, target / "repos" / name, ignore=copied, symlinks=True)
            file.write(json.dumps(row) + "\n")
    if packages is not None:
        shutil.copytree(packages, target / "packages")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows")
    parser.add_argument("checkouts", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--split", default="test", help="of a dataset")
    parser.add_argument(
        "--packages", type=Path, help="what tests import: a directory, as pip install --target makes it"
    )
    parser.add_argument("--command", default="python -m pytest -rA", help="runs tests, for rows that do not say how")
    parser.add_argument("--parser", default="parse_log_pytest", help="of swebench, for rows that name none")
    given = parser.parse_args()
    rows = [
        row if row.get("eval_script") else judged(row, given.command, given.parser)
        for row in load(given.rows, given.split)
    ]
    make(rows, given.checkouts, given.target, given.packages)


if __name__ == "__main__":
    main()
