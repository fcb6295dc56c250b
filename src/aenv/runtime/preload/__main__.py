"""``python -m aenv.runtime.preload PATH``: the verdict on a project, as JSON. What ``aenv validate`` runs."""

from __future__ import annotations

import os
import sys

import msgspec

from aenv import project
from aenv.errors import AEnvError
from aenv.runtime import loader
from aenv.runtime.preload import watch


def main(path: str) -> None:
    answer = os.dup(1)
    os.dup2(2, 1)  # what the author's modules print is not part of the answer
    try:
        found = project.read(path, config_required=False)
        sys.argv = [found.name]
        with watch(found.source) as watched:
            loader.load(found)
    except AEnvError as exc:
        sys.stderr.write(f"error: {exc}\n")
        os._exit(1)
    with os.fdopen(answer, "wb") as file:
        file.write(msgspec.json.encode(watched.verdict()))
    os._exit(0)  # whatever threads the import left


if __name__ == "__main__":
    main(sys.argv[1])
