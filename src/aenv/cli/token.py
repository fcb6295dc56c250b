"""``aenv token``: who may use the platform, and for what."""

from __future__ import annotations

from collections.abc import Sequence

import click

from aenv.cli import Commands
from aenv.cli.output import output_option, say, show_json, show_record
from aenv.cli.platform import accounts_client, page_options, plain, show_page, system_option, talk
from aenv.errors import Invalid
from aenv.wire import Token, TokenRequest

SCOPES = ("read", "push", "run", "engine", "fetch", "admin")


@click.group(cls=Commands)
def token() -> None:
    """Make, list and revoke tokens for a platform.

    A token has an owner, whose things it opens, and scopes: read, push, run, engine, fetch, admin.

    \b
    Example:
      aenv token create --name ci --scope read --scope push --ttl 90d
      AENV_API_KEY=aenv_... aenv list
    """


@token.command()
@click.option("--name", default="", show_default=False, help="What it is for, so that it is known in lists.")
@click.option("--owner", help="Whose it is to be; for admins. Else: the owner of the token in use.")
@click.option(
    "--scope",
    "scopes",
    type=click.Choice(SCOPES),
    multiple=True,
    help="What it is to open; repeatable. Else: those of read, push and run that the token in use has.",
)
@click.option("--ttl", help="How long it lives: 90d, 12h. Else: as long as the token in use.")
@system_option
@output_option
def create(
    *, name: str, owner: str | None, scopes: Sequence[str], ttl: str | None, system_url: str | None, output: str
) -> None:
    """Make a token. It is shown this once; the platform keeps only its digest.

    \b
    Example:
      aenv token create --owner alice --scope read --scope run --ttl 30d
    """
    request = TokenRequest(name=name, owner=owner, scopes=list(scopes) or None, ttl=ttl)
    made = talk(accounts_client(system_url).create_token(request))
    if output == "json":
        show_json(plain(made))
        return
    show_record(
        {
            "token": made.token,
            "id": made.id,
            "name": made.name or "-",
            "owner": made.owner,
            "scopes": ", ".join(made.scopes),
            "expires": made.expires_at or "never",
        },
        output,
    )
    say("keep it now: it is not shown again. Use it as AENV_API_KEY, or give it to 'aenv config set api_key'")


@token.command(name="list")
@click.option("--owner", help="Only those of this owner; for admins.")
@page_options
@system_option
@output_option
def list_(*, owner: str | None, limit: int, offset: int, system_url: str | None, output: str) -> None:
    """List your tokens, or, for an admin, everybody's.

    \b
    Example:
      aenv token list
    """
    found = talk(accounts_client(system_url).tokens(owner, limit=limit, offset=offset), "the tokens")
    show_page(found, output, ["id", "name", "owner", "scopes", "created", "expires", "made by"], _row, offset)


@token.command()
@click.argument("id")
@system_option
@output_option
def revoke(*, id: str, system_url: str | None, output: str) -> None:
    """End a token, and the tokens that were made with it.

    \b
    Example:
      aenv token revoke 4f1c0d2ab6e93875
    """
    if id.startswith("aenv_"):
        raise Invalid("that is a token, not its id", hint="take the id from 'aenv token list'")
    talk(accounts_client(system_url).revoke_token(id))
    if output == "json":
        show_json({"id": id, "revoked": True})
    else:
        say(f"revoked {id}")


def _row(found: Token) -> list[str]:
    expires = found.expires_at or "never"
    return [found.id, found.name, found.owner, ",".join(found.scopes), found.created_at, expires, found.made_by]
