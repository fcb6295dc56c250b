"""Who asks, and what they may do."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct

from aenv.errors import Forbidden, Invalid, did_you_mean


class Scope(StrEnum):
    """What a token opens. Each includes ``read``; ``admin`` includes all, and everybody's things."""

    READ = "read"
    """Look: environments, one's own instances."""
    PUSH = "push"
    """Publish environments."""
    RUN = "run"
    """Make instances, call them, end them."""
    ENGINE = "engine"
    """Have sandboxes made and ended by a controller: what an API service needs of it."""
    FETCH = "fetch"
    """Read every environment of a hub, whoever's it is: what an API service needs of it."""
    ADMIN = "admin"

    @classmethod
    def parse(cls, names: Iterable[str]) -> frozenset[Scope]:
        known = {scope.value: scope for scope in cls}
        for name in names:
            if name not in known:
                raise Invalid(f"there is no scope {name!r}", hint=did_you_mean(name, known))
        return frozenset(known[name] for name in names)


class Caller(Struct, frozen=True):
    """Whoever showed a token."""

    owner: str
    scopes: frozenset[Scope]
    token_id: str = ""

    @property
    def admin(self) -> bool:
        return Scope.ADMIN in self.scopes

    def has(self, scope: Scope) -> bool:
        return scope in self.scopes or self.admin or (scope is Scope.READ and bool(self.scopes))

    def require(self, scope: Scope) -> None:
        if not self.has(scope):
            raise Forbidden(
                f"this token may not {scope}: it is for {', '.join(sorted(self.scopes)) or 'nothing'}",
                hint=f"ask for a token with the scope {scope.value!r}",
            )

    def owns(self, owner: str) -> bool:
        """Whether what belongs to ``owner`` is this caller's to see and touch."""
        return self.admin or owner == self.owner
