"""The pods of an engine as its cluster tells of them: listed once, then followed, without a gap.

What a server does not remember any more (410), or what happened while nobody could ask it, is found by listing again;
so whoever looks here never asks the cluster for one pod.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import aclosing
from time import monotonic
from typing import NamedTuple

import msgspec
from msgspec import Struct

from aenv.engines.kubernetes import pods
from aenv.engines.kubernetes.api import Cluster, Expired, Status, told_failure
from aenv.engines.kubernetes.manifests import ENDED, EXPIRES, FACTS, STATE, Facts
from aenv.engines.kubernetes.pods import Pod
from aenv.errors import AEnvError

log = logging.getLogger("aenv.engine")
PAGE = 500
"""Pods that are listed at once."""
_TURN = 300
"""Seconds after which a server ends a stream that nobody ended: another one may take over then."""
_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_TRIES = 5
"""How often a stream may fail before all is listed again."""
_REMEMBERED = 4096
"""Pods that are gone, whose late news are not believed."""
_SPARE = 256
"""Times that may be kept for nothing, besides as many as there are pods."""
_KEPT = (FACTS, EXPIRES, ENDED)


class Entry(NamedTuple):
    """A pod, and what is known of the sandbox in it."""

    pod: Pod
    facts: Facts
    expires_at: float | None
    began: bool
    """Whether all its containers were seen to run, or to have ended, by now."""


class _Event(Struct):
    type: str
    object: msgspec.Raw


class _Bookmark(Struct):
    class Meta(Struct, rename="camel"):
        resource_version: str = ""

    metadata: Meta


_event = msgspec.json.Decoder(_Event).decode
_bookmark = msgspec.json.Decoder(_Bookmark).decode
_status = msgspec.json.Decoder(Status).decode


class Cache:
    """All pods with some labels. ``tell`` is called with the name of each that changed, or is gone."""

    def __init__(self, cluster: Cluster, path: str, selector: str, tell: Callable[[str], None]) -> None:
        self._cluster, self._path, self._selector, self._tell = cluster, path, selector, tell
        self._entries: dict[str, Entry] = {}
        self._ends: list[tuple[float, str]] = []
        """A heap of when each is over, and of times that do not count any more."""
        self._over: set[str] = set()
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        self._version = ""
        self._meanwhile: set[str] | None = None
        """Pods that were told of while all are listed: the list may be older."""
        self._following: asyncio.Task[None] | None = None
        self.heard = self.heard_bytes = 0
        """Changes that the cluster told of, so far, and the bytes in which it did."""

    async def open(self) -> None:
        """List what there is, and follow it from then on."""
        if self._following is None:
            await self._list()
            self._following = asyncio.create_task(self._follow())

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    # What is known

    def get(self, name: str) -> Entry | None:
        return self._entries.get(name)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    def due(self, now: float) -> list[str]:
        """Those whose time to live is over. It costs what is due, however many there are."""
        found: dict[str, float] = {}
        while self._ends and self._ends[0][0] <= now:
            moment, name = heapq.heappop(self._ends)
            entry = self._entries.get(name)
            if entry is not None and entry.expires_at == moment:
                found[name] = moment
        for name, moment in found.items():  # until they are gone
            heapq.heappush(self._ends, (moment, name))
        return list(found)

    def over_before(self, moment: float) -> list[str]:
        """Those that ended before then."""
        return [name for name in self._over if 0 < self._entries[name].pod.over_since < moment]

    async def changed(self, name: str, timeout: float | None = None) -> bool:
        """Wait until there is news of a pod, not longer than so many seconds; whether there is."""
        news = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, []).append(news)
        try:
            await asyncio.wait((news,), timeout=timeout)
            return news.done()
        finally:
            waiting = self._waiting.get(name, [])
            if news in waiting:
                waiting.remove(news)
            if not waiting:
                self._waiting.pop(name, None)

    # News

    def note(self, pod: Pod) -> None:
        """A pod as it is now. News of one that is gone come too late, and so does an answer that was overtaken by what
        the cluster told meanwhile."""
        if pod.metadata.uid in self._gone:
            return
        before = self._entries.get(pod.name)
        if before is not None and _is_same(pod, before) and _is_older(pod, before.pod):
            return
        if self._meanwhile is not None:
            self._meanwhile.add(pod.metadata.uid)
        self._keep(pod, before)

    def _keep(self, pod: Pod, before: Entry | None) -> None:
        annotations = pod.metadata.annotations
        known = before is not None and before.pod.metadata.annotations.get(FACTS) == annotations.get(FACTS)
        facts = before.facts if before is not None and known else pods.facts_of(pod)
        if facts is None:
            return
        pod.metadata.annotations = {name: annotations[name] for name in _KEPT if name in annotations}
        pod.metadata.labels = {STATE: pod.state}
        entry = self._entries[pod.name] = Entry(
            pod, facts, pod.expires_at, pod.began or (before is not None and _is_same(pod, before) and before.began)
        )
        (self._over.add if pod.over else self._over.discard)(pod.name)
        if entry.expires_at is not None and (before is None or before.expires_at != entry.expires_at):
            self._ends_at(entry.expires_at, pod.name)
        self._wake(pod.name)

    def _ends_at(self, moment: float, name: str) -> None:
        heapq.heappush(self._ends, (moment, name))
        if len(self._ends) > _SPARE + 2 * len(self._entries):  # most are of times that were put off, or of pods gone
            self._ends = [(one.expires_at, one.pod.name) for one in self if one.expires_at is not None]
            heapq.heapify(self._ends)

    def forget(self, name: str, uid: str) -> None:
        """A pod is gone."""
        self._gone[uid] = None
        while len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)
        found = self._entries.get(name)
        if found is not None and found.pod.metadata.uid == uid:
            del self._entries[name]
            self._over.discard(name)
            self._wake(name)

    def _wake(self, name: str) -> None:
        for news in self._waiting.pop(name, ()):
            if not news.done():
                news.set_result(None)
        self._tell(name)

    async def _list(self) -> None:
        self._meanwhile = set()
        try:
            await self._list_all(self._meanwhile)
        finally:
            self._meanwhile = None

    async def _list_all(self, newer: set[str]) -> None:
        """What is listed counts, whatever its version: a cluster that was restored is back in an earlier time."""
        seen: set[str] = set()
        query = {"labelSelector": self._selector, "limit": str(PAGE)}
        while True:
            found = pods.decode_list(await self._cluster.fetch("GET", self._path, query=query))
            for pod in found.items:
                seen.add(pod.metadata.uid)
                before = self._entries.get(pod.name)
                if pod.metadata.uid not in self._gone and (before is None or before.pod.metadata.uid not in newer):
                    self._keep(pod, before)
            if not found.metadata.continue_:
                break
            query["continue"] = found.metadata.continue_
        seen |= newer
        for entry in list(self._entries.values()):
            if entry.pod.metadata.uid not in seen:
                self.forget(entry.pod.name, entry.pod.metadata.uid)
        self._version = found.metadata.resource_version

    async def _follow(self) -> None:
        pause, failures, is_sure = _PAUSE, 0, True
        while True:
            try:
                if not is_sure:
                    await self._check_time()
                    is_sure = True
                if not self._version:
                    await self._list()
                begun = monotonic()
                await self._hear()
                if monotonic() - begun > _LONGEST_PAUSE:
                    pause = _PAUSE
                    continue  # the server ended it in good order
            except Expired as exc:
                log.info("what happened to pods is not remembered any more, and is looked at again: %s", exc.message)
                self._version = ""
            except AEnvError as exc:
                log.warning("news of pods stopped, and are asked for again: %s", exc.message)
                failures, is_sure = failures + 1, False
            except Exception:  # an answer that nobody understands must not end the only one who listens
                log.exception("news of pods stopped, and are asked for again")
                failures, is_sure = failures + 1, False
            if failures >= _TRIES:  # the version itself may be what the server stumbles over
                self._version, failures = "", 0
            await asyncio.sleep(pause * (0.5 + random.random()))  # noqa: S311
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _check_time(self) -> None:
        """See whether the cluster is back in an earlier time, restored from what somebody kept. It would tell of
        nothing then until it is as late as it was."""
        query = {"labelSelector": self._selector, "limit": "1"}
        found = pods.decode_list(await self._cluster.fetch("GET", self._path, query=query))
        if self._version and _is_before(found.metadata.resource_version, self._version):
            log.warning("the cluster is back in an earlier time: its pods are looked at again")
            self._version = ""

    async def _hear(self) -> None:
        query = {
            "watch": "1",
            "labelSelector": self._selector,
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(int(_TURN * (1 + random.random()))),  # noqa: S311
        }
        async with aclosing(self._cluster.lines(self._path, query)) as lines:
            async for line in lines:
                if line:
                    self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            event = _event(line)
            if event.type == "ERROR":
                told = _status(event.object)
                raise told_failure(told.code or 500, told)
            if event.type == "BOOKMARK":
                self._version = _bookmark(event.object).metadata.resource_version
                return
            pod = pods.decode(event.object)
        except msgspec.MsgspecError as exc:
            log.warning("the cluster tells of a pod in a way nobody understands: %s", exc)
            self._version = ""
            raise Expired("a change was not understood") from exc
        self.heard += 1
        self.heard_bytes += len(line)
        self._version = pod.metadata.resource_version
        if event.type == "DELETED":
            self.forget(pod.name, pod.metadata.uid)
        else:
            self.note(pod)


def _is_same(pod: Pod, before: Entry) -> bool:
    return pod.metadata.uid == before.pod.metadata.uid


def _is_older(pod: Pod, other: Pod) -> bool:
    """Whether it tells of an earlier time: answers and news overtake each other."""
    return _is_before(pod.metadata.resource_version, other.metadata.resource_version)


def _is_before(version: str, other: str) -> bool:
    try:
        return int(version) < int(other)
    except ValueError:
        return False
