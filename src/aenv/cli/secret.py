"""``aenv secret``: values that instances get and nobody is shown."""

from __future__ import annotations

import sys

import click

from aenv.cli import Commands
from aenv.cli.output import output_option, say, show_json
from aenv.cli.platform import accounts_client, page_options, plain, show_page, system_option, talk
from aenv.errors import Invalid, TooLarge
from aenv.wire import Secret

LARGEST = 64 * 1024
"""Bytes of a value."""


@click.group(cls=Commands)
def secret() -> None:
    """Set, list and delete secrets on a platform.

    An environment names those that it needs in `deployConfig.secrets`; its instances get your values as environment
    variables. Values are shown to nobody, and are taken out of logs and answers.

    \b
    Example:
      aenv secret set OPENAI_API_KEY
      aenv secret set DEPLOY_KEY < key.pem
    """


@secret.command(name="set")
@click.argument("name")
@click.option("--owner", help="Whose it is to be; for admins.")
@system_option
@output_option
def set_(*, name: str, owner: str | None, system_url: str | None, output: str) -> None:
    """Set a secret. Its value is read from standard input, or asked for; it is no argument, which others could see.

    \b
    Example:
      aenv secret set OPENAI_API_KEY
      pass show openai | aenv secret set OPENAI_API_KEY
    """
    made = talk(accounts_client(system_url).set_secret(name, secret_value(name), owner=owner))
    if output == "json":
        show_json(plain(made))
    else:
        say(f"set {made.name} of {made.owner}")


@secret.command(name="list")
@click.option("--owner", help="Only those of this owner; for admins.")
@page_options
@system_option
@output_option
def list_(*, owner: str | None, limit: int, offset: int, system_url: str | None, output: str) -> None:
    """List your secrets, without their values, or, for an admin, everybody's.

    \b
    Example:
      aenv secret list
    """
    found = talk(accounts_client(system_url).secrets(owner, limit=limit, offset=offset), "the secrets")
    show_page(found, output, ["name", "owner", "created", "updated"], _row, offset)


@secret.command()
@click.argument("name")
@click.option("--owner", help="Whose it is; for admins.")
@system_option
@output_option
def delete(*, name: str, owner: str | None, system_url: str | None, output: str) -> None:
    """Delete a secret. Instances that have it keep it.

    \b
    Example:
      aenv secret delete OPENAI_API_KEY
    """
    talk(accounts_client(system_url).delete_secret(name, owner=owner))
    if output == "json":
        show_json({"name": name, "deleted": True})
    else:
        say(f"deleted {name}")


def secret_value(name: str) -> str:
    """What is typed twice without being seen, or all of standard input less the end of its last line."""
    if sys.stdin.isatty():
        value: str = click.prompt(f"Value of {name}", hide_input=True, confirmation_prompt=True, err=True)
        return value
    data = sys.stdin.buffer.read(LARGEST + 3)
    if len(data) > LARGEST + 2:
        raise TooLarge(f"the value of {name} has more than {LARGEST} bytes")
    try:
        text = data.decode()
    except UnicodeDecodeError as exc:
        raise Invalid(f"the value of {name} is not text in UTF-8", hint="encode it, with base64 for example") from exc
    if "\n" not in text.strip():
        text = text.strip("\r\n")
    return text


def _row(found: Secret) -> list[str]:
    return [found.name, found.owner, found.created_at, found.updated_at]
