"""Whose code it is: tells an author's files from libraries', finds who a call is made for, and names places."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Literal

Kind = Literal["project", "library", "standard", "import"]
_OURS = f"{Path(__file__).parent.parent.parent}{os.sep}"
_STANDARD = f"{Path(os.__file__).parent}{os.sep}"
_INSTALLED = ("site-packages", "dist-packages")


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """From a frame outwards."""
    while frame is not None:
        yield frame
        frame = frame.f_back


class Authors:
    """For an import that is begun in the frame ``outside``: that and what is further out is not looked at."""

    def __init__(self, source: Path, outside: FrameType) -> None:
        self._root = source.parent if source.name == "src" else source
        self._source = tuple({f"{folder}{os.sep}" for folder in (source, source.resolve())})
        self._known: dict[str, Kind] = {}
        self._outside = set(frames(outside))

    def forget(self) -> None:
        """Let go of the frames."""
        self._outside.clear()

    def kind(self, file: str) -> Kind:
        """Whose file it is. ``standard`` acts for its caller. What is in no known place counts as the project's."""
        found = self._known.get(file)
        if found is None:
            found = self._known[file] = self._kind(file)
        return found

    def _kind(self, file: str) -> Kind:
        if file.startswith("<"):
            return "import" if file.startswith("<frozen importlib") else "standard"
        own = next((folder for folder in self._source if file.startswith(folder)), "")
        if any(folder in file[len(own) :].split(os.sep) for folder in _INSTALLED):
            return "library"
        if own:
            return "project"
        if file.startswith(_OURS):
            return "library"
        return "standard" if file.startswith(_STANDARD) else "project"

    def of(self, frame: FrameType) -> Kind:
        return self.kind(frame.f_code.co_filename)

    def is_standard(self, frame: FrameType, files: tuple[str, ...]) -> bool:
        """Whether its code is in one of these files of the standard library."""
        return self.of(frame) == "standard" and frame.f_code.co_filename.endswith(files)

    def inside(self, frame: FrameType) -> Iterator[FrameType]:
        """The frames from this one out to where the import begins."""
        for found in frames(frame):
            if found in self._outside:
                return
            yield found

    def actor(self, frame: FrameType) -> FrameType | None:
        """The project's frame that this happens for; None when a library does it for itself, as it is imported."""
        found = next((found for found in self.inside(frame) if self.of(found) in ("project", "import")), None)
        return found if found and self.of(found) == "project" else None

    def reader(self, frame: FrameType) -> FrameType | None:
        """The project's frame that does this with nothing but the standard library between."""
        found = next((found for found in self.inside(frame) if self.of(found) != "standard"), None)
        return found if found and self.of(found) == "project" else None

    def library(self, frame: FrameType) -> FrameType | None:
        """The library's frame that is nearest."""
        return next((found for found in self.inside(frame) if self.of(found) == "library"), None)

    def trail(self, frame: FrameType) -> str:
        """The place in the project; with the one in the library before it, when it is the import of that."""
        importer = next((found for found in self.inside(frame) if self.of(found) == "project"), None)
        if importer is not None and importer is self.actor(frame):
            return self.place(importer.f_code.co_filename, importer.f_lineno)
        doer = self.library(frame) or frame
        place = self.place(doer.f_code.co_filename, doer.f_lineno)
        if importer is None:
            return place
        return f"{place}, imported at {self.place(importer.f_code.co_filename, importer.f_lineno)}"

    def place(self, file: str, line: int) -> str:
        """``src/custom_env.py:3``, or a library's file as it is imported."""
        for root in (self._root, self._root.resolve()):
            if Path(file).is_relative_to(root) and self.kind(file) == "project":
                return f"{Path(file).relative_to(root)}:{line}"
        for folder in _INSTALLED:
            file = file.rpartition(f"{os.sep}{folder}{os.sep}")[2]
        return f"{file.removeprefix(_STANDARD)}:{line}"
