"""``aenv usage``: what a platform counted, for its user and for an admin, as a table, JSON and CSV."""

import asyncio
import csv
import io
import time

import pytest

from aenv.api.usage import DAY, HOUR, Ledger, Used
from aenv.store import open_store
from aenv.wire import timestamp
from tests.platform.support import Platform, ask, new_home

NOW = time.time()
NOON = int(NOW // DAY) * DAY - 10 * DAY + 12 * HOUR
"""Ten days ago, when nothing else was used."""


async def fill(path):
    async with await open_store(f"sqlite:{path}") as store:
        ledger, used = Ledger(store), Used()
        for hour in range(30):
            at = NOON + hour * HOUR
            used.span(at, at + 100.25, "alice", "first")
            used.add(at, "alice", "first", "calls", 2)
        used.add(NOON, "alice", "", "instances", 3)
        used.add(NOON, "bob", "=first", "cpu_seconds", 1.5)
        for number in range(1100):
            used.add(NOON + 40 * HOUR + number % 3 * HOUR, "carol", f"e{number % 550}", "calls", 1)
        await store.change(*ledger.changes(used))


@pytest.fixture(scope="module")
def platform():
    """A platform that had users before, and just now one whose instance was called, and lives on."""
    with new_home() as home:
        (home / "platform").mkdir(mode=0o700)
        asyncio.run(fill(home / "platform" / "platform.db"))
        found = Platform(home)
        try:
            found.start()
            made = found.create(found.push(), labels={"experiment": "live"})
            for _ in range(3):
                assert found.call(made["id"], "POST", "/tools/echo", {"text": "x"}).status < 500
            assert found.call(made["id"], "GET", "/tools").status == 200
            found.stop()  # which writes down what was used
            found.start()
            yield found
        finally:
            found.end()


@pytest.fixture
def usage(aenv, platform, monkeypatch):
    """The command of the platform's user, who is an admin."""
    monkeypatch.setenv("AENV_HOME", str(platform.home))
    monkeypatch.setenv("AENV_SYSTEM_URL", platform.control)
    return lambda *arguments: aenv("usage", *arguments)


def ok(answer):
    assert answer.code == 0, answer.err
    return answer


def between(first, last):
    return "--since", timestamp(NOON + first * HOUR), "--until", timestamp(NOON + last * HOUR)


def test_what_was_used_lately_is_shown_by_experiment(usage):
    [found] = ok(usage("--experiment", "live", "-o", "json")).data["items"]
    assert (found["instances"], found["calls"]) == (1, 3)
    assert 0 < found["instance_seconds"] < 3600
    assert found["cpu_seconds"] >= 0
    table = ok(usage()).out
    assert "EXPERIMENT" in table
    assert "live" in table
    assert "first" not in table


def test_rows_are_added_up_by_what_is_asked_for(usage):
    times = between(0, 36)
    by_experiment = ok(usage(*times, "-o", "json")).data
    assert by_experiment["by"] == "experiment"
    assert by_experiment["items"] == [
        {"owner": "alice", "experiment": "", "instances": 3, "instance_seconds": 0, "cpu_seconds": 0, "calls": 0},
        {
            "owner": "alice",
            "experiment": "first",
            "instances": 0,
            "instance_seconds": 3007.5,
            "cpu_seconds": 0,
            "calls": 60,
        },
        {"owner": "bob", "experiment": "=first", "instances": 0, "instance_seconds": 0, "cpu_seconds": 1.5, "calls": 0},
    ]
    by_owner = ok(usage(*times, "--by", "owner", "-o", "json")).data["items"]
    assert [(item["owner"], item["instances"], item["calls"]) for item in by_owner] == [("alice", 3, 60), ("bob", 0, 0)]
    by_day = ok(usage(*times, "--by", "day", "--experiment", "first", "-o", "json")).data["items"]
    assert [item["calls"] for item in by_day] == [24, 36]
    assert by_day[0]["day"] == timestamp(NOON)[:10]
    by_hour = ok(usage(*between(3, 5), "--by", "hour", "-o", "json")).data["items"]
    assert [(item["hour"], item["calls"]) for item in by_hour] == [
        (timestamp(NOON + hour * HOUR), 2) for hour in (3, 4)
    ]
    assert ok(usage(*times, "--experiment", "", "-o", "json")).data["items"] == by_experiment["items"][:1]
    assert ok(usage(*times, "--owner", "bob", "-o", "json")).data["items"] == by_experiment["items"][2:]


def test_it_is_exported_as_csv(usage):
    answer = ok(usage(*between(0, 2), "--by", "hour", "--owner", "alice", "-o", "csv"))
    rows = list(csv.DictReader(io.StringIO(answer.out)))
    assert list(rows[0]) == ["hour", "owner", "experiment", "instances", "instance_seconds", "cpu_seconds", "calls"]
    assert [(row["experiment"], row["calls"]) for row in rows] == [("", "0"), ("first", "2"), ("first", "2")]
    assert answer.err == ""


def test_more_than_a_page_and_more_than_a_week_come_whole(usage):
    found = ok(usage("--since", "30d", "--owner", "carol", "-o", "json")).data["items"]
    assert len(found) == 550
    assert sum(item["calls"] for item in found) == 1100


def test_others_see_their_own(usage, platform, monkeypatch):
    made = platform.ask("POST", "/token", {"owner": "bob", "scopes": ["read"]}).data
    monkeypatch.setenv("AENV_API_KEY", made["token"])
    [mine] = ok(usage("--since", "30d", "-o", "json")).data["items"]
    assert (mine["owner"], mine["cpu_seconds"]) == ("bob", 1.5)
    answer = usage("--owner", "alice")
    assert (answer.code, answer.out) == (1, "")
    assert "'alice' are not yours" in answer.err


def test_nothing_is_an_empty_table(usage):
    answer = ok(usage("--since", "30d", "--owner", "nobody"))
    assert answer.out.splitlines() == ["OWNER  EXPERIMENT  INSTANCES  INSTANCE SECONDS  CPU SECONDS  CALLS"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--since", "yesterday"], 1, "--since 'yesterday' is no time"),
        (["--until", "soon"], 1, "--until 'soon' is no time"),
        (["--since", "1h", "--until", "2h"], 2, "is not before --until"),
        (["--by", "minute"], 2, "'minute'"),
        (["--owner", "a/b"], 1, "not an owner's name"),
    ],
)
def test_wrong_usage(usage, arguments, code, message):
    answer = usage(*arguments)
    assert (answer.code, answer.out) == (code, "")
    assert message in answer.err
    assert "Traceback" not in answer.err


@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        ("since=x", 422, "since 'x' is no time"),
        ("since=2026-01-02&until=2026-01-01", 422, "is not before"),
        ("since=200d", 422, "more than 100 days"),
        ("since=1e300", 422, ""),
        ("since=0001-01-01&until=0001-01-02", 422, "is not before"),
        ("since=9999-12-31&until=9999-12-31T23:59:59", 422, "is not before"),
        ("owner=a%2Fb", 422, "not an owner's name"),
        ("limit=-1", 422, ""),
        ("since=24h&experiment=%F0%9F%8E%88", 200, ""),
    ],
)
def test_questions_over_http(platform, query, status, message):
    reply = ask(platform.control, "GET", f"/usage?{query}", token=platform.token)
    assert reply.status == status, reply.body
    assert message.encode() in reply.body.replace(b"\\u0027", b"'")
    assert ask(platform.control, "GET", "/usage").status == 401
