"""The list that every engine must pass, ours and other people's: ``run`` it, or ``aenv doctor --engine NAME``.

Each check makes sandboxes of a small project that ships with it, labels them, and ends them, so that an engine can be
tested while others use it. What an engine's mode cannot promise it says in ``Engine.cannot``; that is skipped, with
the reason.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from aenv.cleanup import finish
from aenv.engines.base import Engine
from aenv.engines.conformance import crowds, ends, inside, life, powers, projects, storage, warm
from aenv.engines.conformance import second as beside
from aenv.engines.conformance.bench import RUN, Bench, Broken, Lab, require, together
from aenv.engines.conformance.table import Check, check
from aenv.errors import AEnvError, NotFound, Unsupported, did_you_mean

__all__ = ["CHECKS", "Check", "Result", "run"]


class Result(NamedTuple):
    """How a check ended."""

    name: str
    status: Literal["pass", "fail", "skip"]
    detail: str
    """The promise that was kept, what was wrong, or why it was skipped."""


async def nothing_is_left(bench: Bench) -> None:
    """When all is done, find shows nothing alive of all that the checks made."""
    left = [sandbox for sandbox in await bench.engine.find({RUN: bench.lab.id}) if not sandbox.state.over]
    require(not left, f"{len(left)} are alive, from {', '.join(sandbox.id for sandbox in left)}")


_LAST = check(nothing_is_left)
CHECKS: tuple[Check, ...] = (
    *life.CHECKS,
    *inside.CHECKS,
    *ends.CHECKS,
    *powers.CHECKS,
    *storage.CHECKS,
    *warm.CHECKS,
    *beside.CHECKS,
    *crowds.CHECKS,
    _LAST,
)
"""All of them, in the order in which they are reported."""


async def run(
    engine: Engine,
    *,
    only: Iterable[str] | None = None,
    on_result: Callable[[Result], None] | None = None,
    another: Callable[[], Engine] | None = None,
    limit: float = 60.0,
    at_once: int = 4,
    second: str = "",
) -> list[Result]:
    """Run the checks, or only those of these names, against an engine. It is not closed.

    ``on_result`` is told each result as it comes. ``another`` makes an engine of the same kind, for what must hold
    across a restart. ``limit`` is the seconds that one check may take; ``at_once`` of them run at the same time.
    ``second`` is what the second container of sandboxes is made of: an image, or, where it begins with ``/``, a
    directory. Without it, what needs that is skipped.
    """
    chosen = _choose(only)
    results: dict[str, Result] = {}
    places = asyncio.Semaphore(at_once)
    with tempfile.TemporaryDirectory(prefix="aenv-conformance-") as folder:
        projects.write(Path(folder))
        lab = Lab(engine, Path(folder), another, limit, second)

        async def one(found: Check) -> None:
            async with places:
                result = results[found.name] = await _result(found, lab)
            if on_result is not None:
                on_result(result)

        try:
            await together(one(found) for found in chosen if found is not _LAST)
        finally:
            await finish(lab.close())
        if _LAST in chosen:
            await one(_LAST)
    return [results[found.name] for found in chosen]


def _choose(only: Iterable[str] | None) -> list[Check]:
    if only is None:
        return list(CHECKS)
    names = set(only)
    known = {found.name: found for found in CHECKS}
    for name in names - set(known):
        raise NotFound(f"there is no check {name!r}", hint=did_you_mean(name, known))
    return [found for found in CHECKS if found.name in names]


async def _result(found: Check, lab: Lab) -> Result:
    if reason := lab.cannot.get(found.name) or lab.cannot.get(found.needs or ""):
        return Result(found.name, "skip", reason)
    bench = Bench(lab, found.name)
    try:
        result = await _attempt(found, bench)
    finally:
        await finish(bench.clean())
    if bench.trouble and result.status == "pass":
        return Result(found.name, "fail", f"cleaning up: {bench.trouble}")
    return result


async def _attempt(found: Check, bench: Bench) -> Result:
    limit = bench.lab.limit
    try:
        async with asyncio.timeout(limit) as clock:
            await found.run(bench)
    except Broken as exc:
        return Result(found.name, "fail", str(exc))
    except Unsupported as exc:
        return Result(found.name, "skip" if found.needs else "fail", exc.message)
    except AEnvError as exc:
        return Result(found.name, "fail", f"{type(exc).__name__}: {exc}")
    except Exception as exc:
        if not clock.expired():
            return Result(found.name, "fail", f"{exc!r} was raised, which is no AEnvError")
        waiting = f", waiting for {bench.waiting}" if bench.waiting else ""
        return Result(found.name, "fail", f"it took longer than {limit:g} s{waiting}")
    return Result(found.name, "pass", found.promise)
