"""Importing a project before it is known which instance it is for, where nothing stands against that."""

from __future__ import annotations

from typing import NamedTuple

import aenv.runtime.validation  # noqa: F401 - what its import does would be seen as what the project's does
from aenv.errors import AEnvError
from aenv.project import Project
from aenv.runtime import loader
from aenv.runtime.loader import Loaded
from aenv.runtime.preload import Verdict, watch


class Early(NamedTuple):
    """An import that was watched."""

    loaded: Loaded | None
    """None when it must not be early. What was imported cannot be taken back: another process has to begin anew."""
    verdict: Verdict


def load(found: Project, preload: bool | str) -> Early:
    """Import the project as ``deployConfig.preload`` says: ``True`` does so whatever is seen, ``"auto"`` heeds it."""
    try:
        with watch(found.source) as watched:
            loaded = loader.load(found)
    except AEnvError as exc:
        if preload is True:
            raise
        return Early(None, Verdict((f"it cannot be imported without an instance's variables: {exc}",)))
    verdict = watched.verdict()
    return Early(loaded if preload is True or verdict.clean else None, verdict)
