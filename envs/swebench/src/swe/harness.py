"""The harness of the package swebench, as far as it grades.

The package's ``swebench.harness`` imports all that it needs for running containers by itself: clients of Docker and of
a cloud, and a library of datasets. Grading takes none of it, so these are not installed, and the parts that grade are
imported past it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import swebench

VERSION = importlib.metadata.version("swebench")


def _bare_package(name: str) -> None:
    """A package whose modules can be imported, and whose own code is not run."""
    package = ModuleType(name)
    package.__path__ = [str(Path(place).joinpath(*name.split(".")[1:])) for place in swebench.__path__]
    sys.modules[name] = package


def _absent(name: str, *attributes: str) -> None:
    """Something in the place of a library that is imported for what is not used here."""
    if importlib.util.find_spec(name) is None:
        library = ModuleType(name)
        library.__dict__.update(dict.fromkeys(attributes))
        sys.modules[name] = library


_bare_package("swebench.harness")
_absent("datasets", "Dataset", "load_dataset", "load_from_disk")
_grading = importlib.import_module("swebench.harness.grading")
_utils = importlib.import_module("swebench.harness.utils")
_constants = importlib.import_module("swebench.harness.constants")
PARSERS = frozenset(_grading.PARSER_REGISTRY)
START: str = _constants.START_TEST_OUTPUT
END: str = _constants.END_TEST_OUTPUT


def spec_of(row: Mapping[str, Any]) -> Any:
    """What the harness makes of a row."""
    return _utils.make_test_spec(dict(row))


def report(spec: Any, patch: str, log: str) -> dict[str, Any]:
    """What the harness says about the log of an evaluation."""
    with tempfile.NamedTemporaryFile("w", suffix=".log", encoding="utf-8") as file:
        file.write(log)
        file.flush()
        prediction = {"instance_id": spec.instance_id, "model_name_or_path": "aenv", "model_patch": patch}
        found = _grading.get_eval_report(spec, prediction, file.name, True)
    verdict: dict[str, Any] = found[spec.instance_id]
    return verdict
