"""Several who are told of every call, as one."""

from __future__ import annotations

from aenv.api.gateway.places import Answered, Watcher


class Watchers:
    """Tells each of them."""

    def __init__(self, *watchers: Watcher) -> None:
        self._watchers = watchers

    def answered(self, call: Answered) -> None:
        for watcher in self._watchers:
            watcher.answered(call)
