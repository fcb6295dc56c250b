"""Usage over HTTP."""

from __future__ import annotations

from typing import Annotated

from aenv.api.clock import Clock
from aenv.api.usage import Ledger
from aenv.auth.callers import Scope
from aenv.web.routes import Call, Paged, Query, Route
from aenv.wire import PAGE, Usage, moment


class Handlers:
    """What each route does, with the words that its caller knows."""

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self._ledger = ledger
        self._clock = clock

    async def find(
        self,
        call: Call,
        since: Annotated[str, Query(about="from when on: a time in ISO 8601, or how long ago, such as 24h")] = "24h",
        until: Annotated[str, Query(about="until when; now by default")] = "",
        owner: Annotated[str | None, Query(about="whose it is; an admin sees everybody's")] = None,
        experiment: Annotated[str | None, Query(about="the value of the label experiment; empty for none")] = None,
        limit: int = PAGE,
        offset: int = 0,
    ) -> Paged[Usage]:
        """What was used, by hour, owner and experiment, the newest hour first.

        Of each hour that begins before until and ends after since. It is written down every few seconds.
        """
        now = self._clock.now()
        return Paged(
            *await self._ledger.find(
                call.caller,
                since=moment(since, now, "since"),
                until=moment(until, now, "until") if until else now,
                owner=owner or None,
                experiment=experiment,
                limit=limit,
                offset=offset,
            )
        )


def routes(ledger: Ledger, clock: Clock) -> list[Route]:
    """The table of routes about usage."""
    handle = Handlers(ledger, clock)
    return [Route("GET", "/usage", handle.find, Scope.READ)]
