"""Routes of tokens, secrets and the audit log, which the hub and the API service have in common."""

from __future__ import annotations

from aenv.auth.audit import Audit
from aenv.auth.callers import Scope
from aenv.auth.secrets import Secrets
from aenv.auth.tokens import Tokens
from aenv.web.routes import Call, Paged, Route
from aenv.wire import PAGE, Audited, Secret, SecretRequest, Token, TokenRequest


class Accounts:
    """What a caller may do about its own tokens and secrets, and an admin about everybody's."""

    def __init__(self, tokens: Tokens, secrets: Secrets, audit: Audit) -> None:
        self._tokens = tokens
        self._secrets = secrets
        self._audit = audit

    async def create_token(self, call: Call, body: TokenRequest) -> Token:
        """Make a token.

        It has the owner and the scopes of the one that it is made with, or fewer scopes, and ends no later. An admin
        may name another owner. The token itself is in this answer only.
        """
        made = await self._tokens.create(call.caller, body)
        call.target = made.id
        return made

    async def list_tokens(
        self, call: Call, owner: str | None = None, limit: int = PAGE, offset: int = 0
    ) -> Paged[Token]:
        """List tokens.

        The caller's own, or, for an admin, everybody's or those of one owner; the newest first.
        """
        return Paged(*await self._tokens.list(call.caller, owner=owner, limit=limit, offset=offset))

    async def revoke_token(self, call: Call, id: str) -> None:
        """Revoke a token.

        With it end the tokens that were made with it. Every server knows within two seconds.
        """
        await self._tokens.revoke(call.caller, id)

    async def set_secret(self, call: Call, name: str, body: SecretRequest, owner: str | None = None) -> Secret:
        """Set a secret.

        Instances of its owner get it as an environment variable where `deployConfig.secrets` names it. Its value is
        never answered.
        """
        return await self._secrets.set(call.caller, name, body.value, owner=owner)

    async def list_secrets(
        self, call: Call, owner: str | None = None, limit: int = PAGE, offset: int = 0
    ) -> Paged[Secret]:
        """List secrets, without their values.

        The caller's own, or, for an admin, everybody's or those of one owner; by name.
        """
        return Paged(*await self._secrets.list(call.caller, owner=owner, limit=limit, offset=offset))

    async def delete_secret(self, call: Call, name: str, owner: str | None = None) -> None:
        """Delete a secret.

        Instances that have it keep it.
        """
        await self._secrets.delete(call.caller, name, owner=owner)

    async def list_audit(self, call: Call, limit: int = PAGE, offset: int = 0) -> Paged[Audited]:
        """Read the audit log, the newest lines first."""
        return Paged(*await self._audit.list(call.caller, limit=limit, offset=offset))


def routes(tokens: Tokens, secrets: Secrets, audit: Audit) -> list[Route]:
    accounts = Accounts(tokens, secrets, audit)
    return [
        Route("POST", "/token", accounts.create_token),
        Route("GET", "/token", accounts.list_tokens),
        Route("DELETE", "/token/{id}", accounts.revoke_token),
        Route("PUT", "/secret/{name}", accounts.set_secret, Scope.RUN),
        Route("GET", "/secret", accounts.list_secrets),
        Route("DELETE", "/secret/{name}", accounts.delete_secret, Scope.RUN),
        Route("GET", "/audit", accounts.list_audit, Scope.ADMIN),
    ]
