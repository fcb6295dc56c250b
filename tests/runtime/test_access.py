"""Who may talk to a sandbox: the matrix of Host and Origin, and what a token opens."""

from __future__ import annotations

import pytest

from aenv.errors import AEnvError, Forbidden, Unauthorized
from aenv.runtime.access import Guard, is_loopback
from aenv.runtime.answers import Request
from aenv.runtime.tokens import Access, Gate, agent_token, digest

OWNER = "secret"
AGENT = agent_token(digest(OWNER))


def asked(
    host: str | None = "127.0.0.1:8081",
    origin: str | None = None,
    *,
    path: str = "/mcp",
    query: bytes = b"",
    authorization: str | None = None,
) -> Request:
    pairs = ((b"host", host), (b"origin", origin), (b"authorization", authorization))
    headers = [(name, value.encode("latin-1")) for name, value in pairs if value is not None]
    return Request("POST", path, query, headers, b"")


def guard(*, loopback: bool = True, allowed: tuple[str, ...] = (), token: str | None = None) -> Guard:
    return Guard(Gate(digest(token) if token else None), loopback=loopback, allowed_hosts=allowed)


def lets_in(keeper: Guard, request: Request) -> bool:
    outcomes = []
    for _ in range(2):  # the second time a pair may be remembered
        try:
            keeper.check_host(request)
        except Forbidden:
            outcomes.append(False)
        else:
            outcomes.append(True)
    assert outcomes[0] == outcomes[1]
    return outcomes[0]


@pytest.mark.parametrize(
    ("host", "on_loopback", "beyond"),
    [
        ("localhost", True, True),
        ("localhost:8081", True, True),
        ("LOCALHOST:8081", True, True),
        ("127.0.0.1", True, True),
        ("127.0.0.1:8081", True, True),
        ("127.8.9.1:1", True, True),
        ("[::1]:8081", True, True),
        ("[::1]", True, True),
        ("10.0.0.5:8081", False, True),
        ("[fd00::5]:8081", False, True),
        ("0.0.0.0:8081", False, True),
        ("evil.com", False, False),
        ("evil.com:8081", False, False),
        ("127.0.0.1.evil.com", False, False),
        ("127.0.0.1.evil.com:8081", False, False),
        ("localhost.evil.com", False, False),
        ("evil-localhost", False, False),
        ("localhost@evil.com", False, False),
        ("127.0.0.1:8081@evil.com", False, False),
        ("localhost\\.evil.com", False, False),
        ("localhost.", False, False),
        ("2130706433", False, False),
        ("0x7f.1", False, False),
        ("[::1", False, False),
        ("", False, False),
        (":8081", False, False),
        (" ", False, False),
        ("\xff", False, False),
        (None, False, False),
    ],
)
def test_hosts(host: str | None, on_loopback: bool, beyond: bool) -> None:
    assert lets_in(guard(loopback=True), asked(host)) is on_loopback
    assert lets_in(guard(loopback=False), asked(host)) is beyond


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:3000", True),
        ("http://LocalHost", True),
        ("https://127.0.0.1:6274", True),
        ("http://[::1]:5173", True),
        ("null", False),
        ("", False),
        ("file://", False),
        ("http://", False),
        ("localhost", False),
        ("http://evil.com", False),
        ("http://evil.com:8081", False),
        ("http://localhost.evil.com", False),
        ("http://127.0.0.1.evil.com:8081", False),
        ("http://localhost@evil.com", False),
        ("http://localhost:8081@evil.com", False),
        ("http://[::1", False),
        ("http://10.0.0.5", False),
    ],
)
@pytest.mark.parametrize("loopback", [True, False])
def test_origins(origin: str, allowed: bool, loopback: bool) -> None:
    assert lets_in(guard(loopback=loopback), asked(origin=origin)) is allowed


@pytest.mark.parametrize(
    ("host", "origin", "loopback", "allowed"),
    [
        ("10.0.0.5:8081", "http://10.0.0.5:8081", False, True),
        ("10.0.0.5:8081", "http://10.0.0.6:8081", False, False),
        ("10.0.0.5:8081", "http://evil.com", False, False),
        ("evil.com", "http://evil.com", False, False),
        ("evil.com", "http://evil.com", True, False),
        ("evil.com", "http://localhost", True, False),
    ],
)
def test_the_servers_own_pages(host: str, origin: str, loopback: bool, allowed: bool) -> None:
    assert lets_in(guard(loopback=loopback), asked(host, origin)) is allowed


@pytest.mark.parametrize("loopback", [True, False])
def test_allowed_hosts(loopback: bool) -> None:
    keeper = guard(loopback=loopback, allowed=("Box.Example",))
    assert lets_in(keeper, asked("box.example:8081", "https://BOX.example"))
    assert lets_in(keeper, asked("localhost", "https://box.example"))
    assert not lets_in(keeper, asked("sub.box.example"))
    assert not lets_in(keeper, asked("box.example.evil.com"))
    assert not lets_in(keeper, asked("box.example", "https://other.example"))


def test_a_refusal_says_which_name_and_what_to_do() -> None:
    with pytest.raises(Forbidden, match="'evil.com'") as caught:
        guard().check_host(asked("evil.com:8081"))
    assert "AENV_ALLOWED_HOSTS" in (caught.value.hint or "")
    with pytest.raises(Forbidden, match=r"pages of 'evil\.com'"):
        guard().check_host(asked(origin="http://evil.com"))


def test_what_was_let_in_opens_nothing_else() -> None:
    keeper = guard()
    for port in range(1000):
        keeper.check_host(asked(f"127.0.0.1:{port}"))
    assert not lets_in(keeper, asked("127.0.0.1:1", "http://evil.com"))
    assert not lets_in(keeper, asked("evil.com"))


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("localhost", True), ("127.0.0.1", True), ("::1", True), ("[::1]", True), ("", False), ("0.0.0.0", False),
     ("10.0.0.1", False), ("example.com", False), ("localhost.", False)],
)  # fmt: skip
def test_which_addresses_are_this_machine(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


@pytest.mark.parametrize(
    ("authorization", "path", "query", "access"),
    [
        (f"Bearer {OWNER}", "/task/reward", b"", Access.OWNER),
        (f"bearer {OWNER}", "/mcp", b"", Access.OWNER),
        (f"Bearer  {OWNER} ", "/mcp", b"", Access.OWNER),
        (f"Bearer {AGENT}", "/mcp", b"", Access.AGENT),
        (f"Basic {OWNER}", "/mcp", b"", Access.NONE),
        (OWNER, "/mcp", b"", Access.NONE),
        ("Bearer", "/mcp", b"", Access.NONE),
        ("Bearer ", "/mcp", b"", Access.NONE),
        ("Bearer \xff", "/mcp", b"", Access.NONE),
        (None, "/mcp", b"", Access.NONE),
        (None, "/mcp", b"token=" + AGENT.encode(), Access.AGENT),
        (None, "/mcp", b"a=1&token=" + AGENT.encode(), Access.AGENT),
        (None, "/mcp", b"mytoken=" + AGENT.encode(), Access.NONE),
        (None, "/mcp", b"token=", Access.NONE),
        (None, "/mcp", b"token=%ff%00", Access.NONE),
        (None, "/tools/t", b"token=" + AGENT.encode(), Access.NONE),
        (None, "/task/reward", b"token=" + OWNER.encode(), Access.NONE),
        ("Bearer wrong", "/mcp", b"token=" + AGENT.encode(), Access.NONE),
    ],
)
def test_where_a_token_may_be(authorization: str | None, path: str, query: bytes, access: Access) -> None:
    request = asked(path=path, query=query, authorization=authorization)
    assert guard(token=OWNER).access(request) is access


@pytest.mark.parametrize("path", ["/exec", "/files", "/ports/80", "/shell"])
def test_what_is_open_to_everybody_gives_no_power_beyond_this_machine(path: str) -> None:
    guard(loopback=True).require(asked(path=path), Access.OWNER)
    guard(loopback=False).require(asked(path="/task/reward"), Access.OWNER)
    with pytest.raises(Forbidden, match=path):
        guard(loopback=False).require(asked(path=path), Access.OWNER)


@pytest.mark.parametrize(
    ("token", "needed", "refused"),
    [
        (OWNER, Access.OWNER, None),
        (OWNER, Access.AGENT, None),
        (AGENT, Access.AGENT, None),
        (AGENT, Access.OWNER, Forbidden),
        ("wrong", Access.AGENT, Unauthorized),
        ("wrong", Access.OWNER, Unauthorized),
        ("wrong", Access.NONE, None),
    ],
)
def test_what_a_route_asks_for(token: str, needed: Access, refused: type[AEnvError] | None) -> None:
    keeper, request = guard(token=OWNER), asked(path="/task/reward", authorization=f"Bearer {token}")
    if refused is None:
        keeper.require(request, needed)
        return
    with pytest.raises(refused, match="/task/reward") as caught:
        keeper.require(request, needed)
    assert type(caught.value) is refused
    assert caught.value.hint
