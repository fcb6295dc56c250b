"""The client of tokens, secrets and the audit log, for the hub and the API service alike."""

from __future__ import annotations

from typing import Any

from aenv.control import Service, key_for, platform_url, segment
from aenv.wire import PAGE, Audited, Secret, SecretRequest, Token, TokenRequest


class AccountsClient(Service):
    """A platform's accounts, as one caller sees them."""

    @classmethod
    def configured(cls, url: str | None = None, key: str | None = None) -> AccountsClient:
        """The platform that arguments, environment variables and the config file name."""
        found = platform_url(url)
        return cls(found, key_for(found, key))

    async def create_token(self, request: TokenRequest) -> Token:
        """A new token; the only answer that has the token itself."""
        return await self.ask("POST", "/token", body=request, type=Token)

    async def tokens(self, owner: str | None = None, *, limit: int = PAGE, offset: int = 0) -> tuple[list[Token], int]:
        """A page of tokens, the newest first, and how many there are."""
        return await self.page("/token", type=Token, query={"owner": owner, "limit": limit, "offset": offset})

    async def revoke_token(self, id: str) -> None:
        """End a token, and those that were made with it."""
        await self.ask("DELETE", f"/token/{segment(id)}", type=Any)

    async def set_secret(self, name: str, value: str, *, owner: str | None = None) -> Secret:
        """Keep a value under a name, in place of the one that is there."""
        return await self.ask(
            "PUT", f"/secret/{segment(name)}", body=SecretRequest(value), query={"owner": owner}, type=Secret
        )

    async def secrets(
        self, owner: str | None = None, *, limit: int = PAGE, offset: int = 0
    ) -> tuple[list[Secret], int]:
        """A page of secrets without their values, by name, and how many there are."""
        return await self.page("/secret", type=Secret, query={"owner": owner, "limit": limit, "offset": offset})

    async def delete_secret(self, name: str, *, owner: str | None = None) -> None:
        await self.ask("DELETE", f"/secret/{segment(name)}", query={"owner": owner}, type=Any)

    async def audit(self, *, limit: int = PAGE, offset: int = 0) -> tuple[list[Audited], int]:
        """A page of the audit log, the newest lines first, and how many there are. For admins."""
        return await self.page("/audit", type=Audited, query={"limit": limit, "offset": offset})
