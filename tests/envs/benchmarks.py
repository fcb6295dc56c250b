"""Help for tests of built-in benchmarks: their packages, which ``make components`` installs."""

from __future__ import annotations

import pytest

from aenv.engines.process.venvs import is_ready
from aenv.project.builtin import builtin_names, builtin_root, needs_packages


def names() -> list[str]:
    """The built-in environments that need packages of others."""
    return [name for name in builtin_names() if needs_packages(builtin_root() / name)]


def needs(name: str) -> pytest.MarkDecorator:
    """Skips tests where the packages of a benchmark are not installed: they are large, and nobody asked for them."""
    ready = is_ready(builtin_root() / name, trusted=True)
    return pytest.mark.skipif(not ready, reason=f"the packages of {name} are not installed: make components")
