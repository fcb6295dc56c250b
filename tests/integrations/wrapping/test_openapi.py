"""HTTP services as projects: a real one on loopback, asked by hand, and by an agent in an instance."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from aenv.errors import CallTimeout, Invalid, SandboxLost
from aenv.integrations.wrapping import openapi
from aenv.integrations.wrapping.operations import Filter, read
from tests.integrations.wrapping.shop import DOCUMENT, KEY

SECRET = "THE_SHOP_KEY"


def client(url: str, timeout: float = 30.0, **credentials: str) -> openapi.Service:
    return openapi.Service(read(DOCUMENT, url, Filter()).operations, credentials, timeout)


@pytest.fixture
async def asking(shop, monkeypatch) -> AsyncIterator[openapi.Service]:
    monkeypatch.setenv(SECRET, KEY)
    made = client(shop.url, key=SECRET)
    await made.start()
    yield made
    await made.stop()


async def test_arguments_go_where_the_document_says(asking):
    listed = await asking.call("listItems", {"tag": ["a", "b c"], "limit": 2})
    assert listed.structured["query"] == [["tag", "a"], ["tag", "b c"], ["limit", "2"]]
    made = await asking.call("addItem", {"name": "nut", "price": 1.5, "note": None})
    assert made.structured["name"] == "nut"
    assert (await asking.call("getItem", {"id": str(made.structured["id"])})).structured == made.structured
    assert (await asking.call("deleteItem", {"id": str(made.structured["id"])})).text == "status 204"
    assert [block["type"] for block in (await asking.call("picture")).content] == ["image"]


async def test_what_is_asked_stays_below_the_path(asking):
    gone = await asking.call("getItem", {"id": "../open"})
    assert (gone.is_error, "there is no item ../open" in gone.text) == (True, True)
    with pytest.raises(Invalid, match="cannot stand in a path"):
        await asking.call("getItem", {"id": ".."})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"price": 1}, "'name' is a required property"),
        ({"name": "nut", "price": 0}, "price: 0 is less than or equal to"),
        ({"name": "nut", "price": 1, "parts": [{"name": "x"}]}, "parts.0: 'price' is a required"),
        ({"name": "nut", "price": 1, "colour": "red"}, "'colour' was unexpected"),
        ({"name": "nut", "price": 1, "id": 7}, "'id' was unexpected"),
    ],
)
async def test_a_wrong_argument_is_named(asking, arguments, said):
    with pytest.raises(Invalid) as raised:
        await asking.call("addItem", arguments)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [("404", "status 404: "), ("500", "status 500: "), ("away", "status 307: to http://127.0.0.2:9/elsewhere")],
)
async def test_what_the_service_answers_is_the_tools(asking, what, said):
    answer = await asking.call("does", {"what": what})
    assert answer.is_error
    assert answer.text.startswith(said)


@pytest.mark.parametrize("value", [f"{KEY}\n", f"{KEY}é"])
async def test_a_secret_that_fits_no_header_is_not_shown(asking, monkeypatch, value):
    monkeypatch.setenv(SECRET, value)
    with pytest.raises(SandboxLost, match=SECRET) as raised:
        await asking.call("listItems")
    assert KEY not in str(raised.value)


async def test_a_secret_in_a_url_is_in_no_log(shop, monkeypatch, caplog):
    monkeypatch.setenv(SECRET, KEY)  # as a URL has it, nobody would know it for the secret
    in_query = {"key": {"type": "apiKey", "in": "query", "name": "key"}}
    found = {**DOCUMENT, "components": {**DOCUMENT["components"], "securitySchemes": in_query}}
    made = openapi.Service(read(found, shop.url, Filter()).operations, {"key": SECRET}, 30.0)
    caplog.set_level("INFO")
    await made.start()
    with pytest.raises(SandboxLost):  # the service wants it in a header
        await made.call("listItems")
    await made.stop()
    assert "/items?" not in caplog.text


async def test_an_answer_is_bounded(asking):
    with pytest.raises(Invalid, match="larger than 4 MiB"):
        await asking.call("does", {"what": "large"})


@pytest.mark.parametrize("what", ["401", "429", "502", "503", "504"])
async def test_a_service_that_cannot_answer_is_no_observation(asking, what):
    with pytest.raises(SandboxLost, match=f"status {what}|answers {what}"):
        await asking.call("does", {"what": what})


async def test_who_is_busy_is_asked_again_and_who_may_have_done_it_is_not(service, monkeypatch):
    monkeypatch.setenv(SECRET, KEY)
    shop = service("shop")
    asking = client(shop.url, key=SECRET)
    await asking.start()
    assert (await asking.call("does", {"what": "busy-once"})).structured == {"times": 2}
    with pytest.raises(SandboxLost, match="502"):
        await asking.call("doesOnce", {"what": "502"})
    with pytest.raises(SandboxLost):
        await asking.call("doesOnce", {"what": "death"})
    with pytest.raises(SandboxLost, match="cannot be reached"):
        await asking.call("open")
    await asking.stop()


async def test_silence_and_a_missing_credential_are_no_observations(shop, monkeypatch):
    monkeypatch.delenv(SECRET, raising=False)
    impatient = client(shop.url, timeout=0.2, key=SECRET)
    await impatient.start()
    with pytest.raises(SandboxLost, match=f"the secret {SECRET} is not set"):
        await impatient.call("listItems")
    assert (await impatient.call("open")).structured == {"open": True, "key": None}
    monkeypatch.setenv(SECRET, KEY)
    with pytest.raises(CallTimeout, match=r"0\.2 s"):
        await impatient.call("does", {"what": "slow"})
    await impatient.stop()
    unnamed = client(shop.url)
    await unnamed.start()
    with pytest.raises(SandboxLost, match="wants key"):
        await unnamed.call("listItems")
    await unnamed.stop()


async def test_a_call_that_is_given_up_harms_no_other(asking):
    call = asyncio.create_task(asking.call("doesOnce", {"what": "slow"}))
    while (await asking.call("does", {"what": "count-slow"})).structured != {"asked": 1}:
        await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await asking.call("open")).structured["open"]


AGENT = """
async def play(env, task):
    await env.call_tool("addItem", {"name": "nut", "price": 2})
    if task.id == "lost":
        try:
            await env.call_tool("does", {"what": "death"})
        finally:
            open("seen", "w").write("once")
        open("seen", "w").write("it went on")
    wrong = await env.call_tool("getItem", {"id": "99"})
    return [wrong.is_error, (await env.call_tool("does", {"what": "near"})).text]
"""


def test_an_episode_is_recorded_and_one_whose_service_dies_has_no_score(service, aenv, played, here):
    shop = service("shop")
    made = aenv("add", "openapi", f"{shop.url}/openapi.json", "-o", "json")
    assert made.code == 0, made.err
    assert made.data["name"] == "the-shop"
    assert made.data["left_out"] == {"POST /upload": "its body is multipart/form-data"}
    assert (made.data["network"], made.data["secrets"]) == ([shop.host], [SECRET])
    good = {"id": "good", "reward": {"tool": "listItems", "expected": '"nut"'}}
    options = ["-e", f"{SECRET}={KEY}", "-c", "1"]
    scored, lost = played("the-shop", AGENT, good, {**good, "id": "lost"}, options=options)
    assert scored.reward == 1.0
    assert scored.answer[0] is True
    assert KEY not in json.dumps(scored.answer)
    assert '"open"' in scored.answer[1]
    assert not lost.ok
    assert lost.outcome.kind == "sandbox_lost"
    assert (here / "the-shop" / "seen").read_text() == "once"


def test_half_a_character_is_refused(aenv, shop, here):
    document = json.dumps({**DOCUMENT, "info": {"title": "Half \ud83d", "version": "1"}})
    (here / "half.json").write_text(document)
    answer = aenv("add", "openapi", "half.json", "--server", shop.url)
    assert answer.code == 1
    assert "halves of characters" in answer.err
    assert not (here / "half").exists()


def test_the_project_keeps_what_it_saw(aenv, shop, here):
    made = aenv("add", "openapi", f"{shop.url}/openapi.json", "--read-only", "--include", "*Item*")
    assert made.code == 0
    assert f"its sandboxes may reach {shop.host}, and no other host" in made.err
    folder = here / "the-shop"
    module = (folder / "src" / "custom_env.py").read_text()
    assert 'include=["*Item*"]' in module
    assert "read_only=True" in module
    document = folder / "src" / "openapi.json"
    kept = json.loads(document.read_text())
    assert kept == DOCUMENT
    again = aenv("add", "openapi", f"{shop.url}/openapi.json")
    assert again.code == 1
    assert "the-shop is not empty" in again.err
    del kept["paths"]["/items"]["get"]
    kept["paths"]["/items/{id}"]["get"]["summary"] = "Another."
    document.write_text(json.dumps(kept))
    line = ("add", "openapi", f"{shop.url}/openapi.json", "--read-only", "--include", "*Item*", "--update")
    changed = aenv(*line, "-o", "json").data
    assert (changed["added"], changed["removed"], changed["changed"]) == (["listItems"], [], ["getItem"])
    assert "nothing has changed" in aenv(*line).err
    assert (folder / "src" / "custom_env.py").read_text() == module


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["http://127.0.0.1:9/openapi.json"], "cannot be reached"),
        (["nowhere.json"], "nowhere.json cannot be read"),
        (["SHOP/items"], "answered with status 401"),
        (["SHOP/openapi.json", "--exclude", "*"], "no operation"),
        (["SHOP/openapi.json", "--server", "ftp://host"], "no http or https URL"),
        (["SHOP/openapi.json", "--name", "no good"], "not a usable name"),
    ],
)
def test_what_cannot_be_added_says_why(aenv, shop, line, said):
    answer = aenv("add", "openapi", *(word.replace("SHOP", shop.url) for word in line))
    assert answer.code != 0
    assert said in answer.err
    assert "hint:" in answer.err
