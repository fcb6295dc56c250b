"""Secrets: their values are in no answer and in nothing that is printed, and no protocol suffers."""

from __future__ import annotations

import json
import random
import re
import string

import pytest

from aenv.runtime.hidden import Hidden, Printing
from tests.runtime.wire import Session, modern, send
from tests.support import sandbox

KEY = 'sk-"xq7zk"\tz\\ü'
WORD = "success"
SHORT = "abc"
CODE = '''
import os, logging
from aenv import *

KEY = os.environ["API_KEY"]

@register_tool
def tell(key: str = KEY, ctx: Context = None) -> dict:
    """Say it in every way."""
    ctx.logger.warning("the key is %s", KEY)
    ctx.progress(1, 2, KEY)
    return {"value": KEY, KEY: [KEY, 1, True], "other": os.environ["SHORT"]}

@register_tool
def fail() -> str:
    raise ValueError(KEY)

@register_tool
def show() -> str:
    print("printed", KEY, flush=True)
    return f"<{KEY}> true success"

@register_reward
def score() -> dict:
    return {"score": 1.0, "why": KEY}

@register_function
def wrong() -> str:
    raise ValueError(KEY)
'''


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    root = tmp_path_factory.mktemp("secrets")
    (root / "src").mkdir()
    (root / "src" / "custom_env.py").write_text(CODE)
    (root / "config.json").write_text(json.dumps({"name": "secrets", "version": "1.0.0"}))
    variables = {"API_KEY": KEY, "WORD": WORD, "FLAG": "true", "SHORT": SHORT}
    with sandbox(root, variables={**variables, "AENV_SECRETS": "API_KEY,WORD,FLAG,SHORT,NOT_SET"}) as running:
        yield running


def hides(*bodies: bytes) -> None:
    for body in bodies:
        assert b"xq7zk" not in body
        assert b"***" in body


def test_results_of_tools(box):
    reply = modern(box.port, "tools/call", {"name": "tell", "arguments": {}})
    hides(reply.body)
    found = reply.json if reply.headers["content-type"] == "application/json" else reply.events[-1]
    assert found["result"]["structuredContent"] == {"value": "***", "***": ["***", 1, True], "other": SHORT}
    assert json.loads(found["result"]["content"][0]["text"]) == found["result"]["structuredContent"]
    assert found["result"]["resultType"] == "complete"
    failed = modern(box.port, "tools/call", {"name": "fail", "arguments": {}})
    hides(failed.body)
    assert failed.json["result"]["isError"]
    # The words of the protocol stay, whatever a secret is; in a text they are hidden.
    shown = modern(box.port, "tools/call", {"name": "show", "arguments": {}}).json["result"]
    assert shown["content"] == [{"type": "text", "text": "<***> *** ***"}]


def test_events(box):
    session = Session(box.port)
    session.request("logging/setLevel", {"level": "debug"})
    reply = session.request("tools/call", {"name": "tell", "arguments": {}, "_meta": {"progressToken": 1}}, id=7)
    hides(reply.body)
    by_method = {event.get("method", "result"): event for event in reply.events}
    assert by_method["notifications/message"]["params"]["data"] == "the key is ***"
    assert by_method["notifications/progress"]["params"]["message"] == "***"
    assert by_method["result"]["id"] == 7


def test_plain_routes(box):
    reward = send(box.port, "POST", "/task/reward", {})
    hides(reward.body)
    assert reward.json == {"success": True, "data": {"score": 1.0, "why": "***"}}
    failed = send(box.port, "POST", "/functions/wrong", {})
    hides(failed.body)
    assert (failed.status, failed.json["success"], failed.json["code"]) == (500, False, "author_failed")
    ran = send(box.port, "POST", "/exec", {"command": 'echo "$API_KEY"; echo "$SHORT"'})
    hides(ran.body)
    assert ran.json["data"]["stdout"] == f"***\n{SHORT}\n"
    send(box.port, "POST", "/tools/tell", {"key": KEY})
    history = send(box.port, "GET", "/history")
    hides(history.body)
    assert {"exec", "tool", "reward"} <= {row["kind"] for row in history.json["data"]}
    assert int(history.headers["content-length"]) == len(history.body)
    assert send(box.port, "GET", "/health").json == {"success": True, "data": {"status": "success"}}


def test_lists_of_tools(box):
    listed = modern(box.port, "tools/list")
    plain = send(box.port, "GET", "/tools")
    hides(listed.body, plain.body)
    assert [tool["name"] for tool in plain.json["data"]] == ["tell", "fail", "show"]
    assert plain.json["data"][0]["inputSchema"]["properties"]["key"]["default"] == "***"


def test_a_file_is_the_owners(box, tmp_path):
    send(box.port, "PUT", f"/files?path={tmp_path}/secret.txt", KEY.encode())
    assert send(box.port, "GET", f"/files?path={tmp_path}/secret.txt").body == KEY.encode()


WRAPPED = '''
import os
from mcp.server import MCPServer

server = MCPServer("wrapped")
KEY = os.environ["API_KEY"]

@server.tool()
def tell(key: str = KEY) -> dict[str, str]:
    """Say it."""
    return {"value": KEY}
'''


def test_a_projects_own_server(tmp_path):
    pytest.importorskip("mcp", reason="the mcp package is not installed")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "custom_env.py").write_text(WRAPPED)
    (tmp_path / "config.json").write_text(json.dumps({"name": "wrapped", "version": "1.0.0"}))
    with sandbox(tmp_path, variables={"API_KEY": KEY, "AENV_SECRETS": "API_KEY"}) as running:
        typed = {"Content-Type": "application/json"}
        told = modern(running.port, "tools/call", {"name": "tell", "arguments": {}}, typed)
        hides(told.body, modern(running.port, "tools/list", headers=typed).body)
        assert (told.events[-1] if told.events else told.json)["result"]["structuredContent"] == {"value": "***"}
        hides(send(running.port, "POST", "/tools/tell", {}).body)


def test_what_is_printed_in_pieces_is_hidden():
    values = ["abcabd", "abcabdabc", "bdq1", "line one of it all\nline two of it all", "x" * 9]
    hidden = Hidden(values)
    source = random.Random(11)
    for _ in range(300):
        text = "".join(source.choice([*values, "abc", "ab", "x", "q", "\n", "bd"]) for _ in range(12)).encode()
        printing = Printing(hidden)
        shown, rest = b"", text
        while rest:
            size = source.randint(1, 7)
            shown += printing.pass_on(rest[:size])
            rest = rest[size:]
        shown += printing.end()
        assert not re.search(b"|".join(re.escape(value.encode()) for value in values), shown)
        assert len(shown) <= len(text) or text.count(b"***") <= shown.count(b"***")
    assert Printing(hidden).pass_on(b"nothing to hide here\n") == b"nothing to hide here\n"
    assert Hidden.of(["A", "B"], {"A": "abc"}) is None


@pytest.mark.parametrize(
    "body", [b"not JSON abcabd", b"[1, 2", b'"abcabd"', b"\xff abcabd", b'{"data": 1e999, "error": "abcabd"}']
)
def test_what_is_no_answer_of_ours_is_hidden_too(body):
    hidden = Hidden(["abcabd"])
    for found in (hidden.envelope(body, "/x"), hidden.rpc(body)):
        assert b"abcabd" not in found


def test_long_values_are_hidden_however_they_are_cut():
    generator = random.Random(7)
    long = "".join(generator.choice(string.printable) for _ in range(1000))
    hidden = Hidden([long, long[:10], "abab", "ababc"])
    assert hidden.text(f"<{long}> <abab> <ababc> <{long[:10]}>") == "<***> <***> <***> <***>"
    data = long.encode()
    for cut in range(1, len(data), 41):
        printing = Printing(hidden)
        shown = printing.pass_on(b"<" + data[:cut]) + printing.pass_on(data[cut:] + b">") + printing.end()
        assert set(shown) == set(b"<*>")


def test_what_comes_close_to_secrets_everywhere_costs_no_more():
    """Each of these pieces took two minutes, in the process that all sandboxes depend on."""
    hidden = Hidden(["a" * 8000 + f"b{number}" for number in range(100)])
    printing = Printing(hidden)
    for _ in range(20):
        printing.pass_on(b"a" * 65536)
        printing.pass_on((b"a" * 63 + b"c") * 1024)
