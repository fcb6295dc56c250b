"""``aenv token`` and ``aenv secret``, against a server of accounts."""

import io
import sys

import pytest

from tests.auth.served import served


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(tmp_path_factory.mktemp("accounts"), tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture
def platform(aenv, server, monkeypatch):
    """The commands of somebody who has the admin's token."""
    monkeypatch.setenv("AENV_SYSTEM_URL", server.url)
    monkeypatch.setenv("AENV_API_KEY", server.admin)
    return aenv


@pytest.fixture
def typed(monkeypatch):
    """What comes through standard input."""

    def type_(data):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return type_


def test_a_token_is_made_listed_and_revoked(platform, monkeypatch):
    answer = platform("token", "create", "--name", "ci", "--owner", "tom", "--scope", "read", "--ttl", "1d")
    assert answer.code == 0, answer.err
    assert "aenv_" in answer.out
    assert "it is not shown again" in answer.err
    [listed] = platform("token", "list", "--owner", "tom", "-o", "json").data["items"]
    assert (listed["name"], listed["scopes"], listed["token"]) == ("ci", ["read"], "")
    assert listed["id"] in platform("token", "list").out
    made = platform("token", "create", "--owner", "tom", "-o", "json").data
    monkeypatch.setenv("AENV_API_KEY", made["token"])
    assert platform("token", "list", "-o", "json").data["total"] == 2
    answer = platform("token", "create", "--scope", "admin")
    assert (answer.code, answer.out) == (1, "")
    assert "no scope admin to give away" in answer.err
    assert platform("token", "revoke", listed["id"], "-o", "json").data == {"id": listed["id"], "revoked": True}
    assert platform("token", "revoke", made["id"]).err == f"revoked {made['id']}\n"
    answer = platform("token", "list")
    assert (answer.code, answer.out) == (1, "")
    assert "not known here" in answer.err
    assert made["token"] not in answer.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["token", "create", "--scope", "fly"], 2, "'fly'"),
        (["token", "create", "--ttl", "soon"], 1, "use 90s, 30m"),
        (["token", "create", "--owner", "a/b"], 1, "not an owner's name"),
        (["token", "list", "--limit", "0"], 2, "--limit"),
        (["token", "revoke", "0123456789abcdef"], 1, "aenv token list"),
        (["token", "revoke", "aenv_" + "x" * 43], 1, "take the id from"),
        (["token", "revok", "x"], 2, "did you mean 'aenv token revoke'?"),
        (["secret", "delete", "NONE"], 1, "has no secret 'NONE'"),
        (["secret", "list", "--owner", "*"], 1, "not an owner's name"),
    ],
)
def test_wrong_usage(platform, arguments, code, message):
    answer = platform(*arguments)
    assert (answer.code, answer.out) == (code, "")
    assert message in answer.err
    assert "aenv_x" not in answer.err


def test_a_secret_is_set_listed_and_deleted(platform, typed):
    typed(b"hunter22\n")
    answer = platform("secret", "set", "API_KEY", "--owner", "sue")
    assert (answer.code, answer.out, answer.err) == (0, "", "set API_KEY of sue\n")
    typed(b"hunter22\r\n")
    assert platform("secret", "set", "OTHER", "--owner", "sue", "-o", "json").data["name"] == "OTHER"
    typed(b"-----BEGIN-----\nhunter22\n-----END-----\n")
    assert platform("secret", "set", "PEM", "--owner", "sue").code == 0
    shown = platform("secret", "list", "--owner", "sue")
    assert [row.split()[0] for row in shown.out.splitlines()] == ["NAME", "API_KEY", "OTHER", "PEM"]
    assert "hunter" not in shown.out
    found = platform("secret", "list", "--owner", "sue", "--limit", "1", "-o", "json").data
    assert (found["total"], found["items"][0]["name"]) == (3, "API_KEY")
    assert platform("secret", "delete", "PEM", "--owner", "sue").err == "deleted PEM\n"
    assert platform("secret", "delete", "OTHER", "--owner", "sue", "-o", "json").data["deleted"] is True


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"", "too short"),
        (b"abc\n", "too short"),
        (b"\xff\xfe\xfd\xfc", "not text in UTF-8"),
        (b"hunter\0hunter", "NUL character"),
        (b"hunter" * 20_000, "more than 65536 bytes"),
        (b" hunter22 \n", "white space"),
    ],
    ids=lambda value: f"{value}"[:20],
)
def test_what_is_no_value(platform, typed, value, message):
    typed(value)
    answer = platform("secret", "set", "KEY")
    assert (answer.code, answer.out) == (1, "")
    assert message in answer.err
    assert "hunter" not in answer.err


def test_a_value_is_no_argument(platform, typed):
    typed(b"")
    answer = platform("secret", "set", "KEY", "hunter22")
    assert answer.code == 2
    assert answer.out == ""


def test_a_person_is_asked_for_the_value(platform, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO())
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    asked = []
    monkeypatch.setattr("click.termui.hidden_prompt_func", lambda prompt: asked.append(prompt) or "hunter22")
    assert platform("secret", "set", "TYPED", "-o", "json").data["name"] == "TYPED"
    assert len(asked) == 2


def test_the_token_of_this_machine_is_found(aenv, server, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("AENV_SYSTEM_URL", server.url)
    answer = aenv("token", "list")
    assert answer.code == 1
    assert "AENV_API_KEY" in answer.err
    monkeypatch.setenv("AENV_HOME", str(server.home))
    assert aenv("token", "list").code == 0
