"""The two credentials of an instance: which opens what."""

from __future__ import annotations

import pytest

from aenv.runtime.tokens import Access, Gate, agent_token, digest, new_owner_token

OWNER = "an owner's secret"
DIGEST = digest(OWNER)
AGENT = agent_token(DIGEST)


@pytest.mark.parametrize(
    ("token", "access"),
    [
        (OWNER, Access.OWNER),
        (AGENT, Access.AGENT),
        (None, Access.NONE),
        ("", Access.NONE),
        ("guess", Access.NONE),
        (OWNER + " ", Access.NONE),
        (OWNER.upper(), Access.NONE),
        (AGENT.upper(), Access.NONE),
        (AGENT[:-1], Access.NONE),
        (DIGEST, Access.NONE),
        ("ø€", Access.NONE),
        (agent_token(digest("another instance")), Access.NONE),
        ("another instance", Access.NONE),
    ],
)
def test_what_a_token_opens(token: str | None, access: Access) -> None:
    assert Gate(DIGEST).access(token) is access


@pytest.mark.parametrize("token", [None, "", "anything", AGENT])
def test_without_a_digest_everybody_is_the_owner(token: str | None) -> None:
    assert Gate(None).access(token) is Access.OWNER


def test_a_level_includes_the_one_before() -> None:
    assert Access.NONE < Access.AGENT < Access.OWNER


def test_what_a_sandbox_holds_does_not_give_the_owner_away() -> None:
    assert len({OWNER, DIGEST, AGENT}) == 3
    assert OWNER not in DIGEST + AGENT
    assert Gate(DIGEST).access(agent_token(AGENT)) is Access.NONE


def test_new_tokens_are_long_and_differ() -> None:
    tokens = {new_owner_token() for _ in range(100)}
    assert len(tokens) == 100
    assert min(map(len, tokens)) >= 43
    assert all(Gate(digest(token)).access(token) is Access.OWNER for token in tokens)
