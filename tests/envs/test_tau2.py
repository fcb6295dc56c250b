"""The built-in tau2 on real instances: its scores are the benchmark's, its user is simulated, and no gold gets out."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from aenv import CallTimeout, Environment, Invalid, ModelError, ToolResult
from aenv.rl import Episode, Task, rollouts
from tests.envs.benchmarks import needs
from tests.rl.bench import Bench
from tests.rl.standin import HANG, Model, calling, model, saying

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("tau2"), needs("tau2")]

IDLE_PASSES = {0, 1, 2, 4, 5, 6, 9, 10, 13, 26, 27, 28, 31, 34, 36, 38, 41, 43, 45, 46, 47, 48, 49}
"""Airline tasks that doing nothing passes in the benchmark's repository."""
CORRECTED = {2, 9, 27, 38}
"""Airline tasks whose gold changes the database in the package, and no longer does in the benchmark's repository."""
SIZES = {"airline": 50, "retail": 114, "telecom": 114}
KEY = "sk-never-to-be-seen"


@asynccontextmanager
async def started(bench: Bench, **options: Any) -> AsyncIterator[Environment]:
    async with bench.env("tau2", startup_timeout=600.0, **options) as env:
        yield env


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def env(bench: Bench) -> AsyncIterator[Environment]:
    """One instance for the module, which plays one episode after the other."""
    async with started(bench) as found:
        yield found


async def tasks(env: Environment, domain: str, **selection: str) -> list[dict[str, Any]]:
    found = await env.call_function("tasks", {"domain": domain, **selection})
    return list(found["tasks"])


async def oracle(env: Environment, task: dict[str, Any]) -> None:
    for step in await env.call_function("solution", {"task": task["reset"]["task"]}):
        if "function" in step:
            await env.call_function(step["function"], step["arguments"])
        else:
            await env.call_tool(step["name"], step["arguments"])


async def scores(env: Environment, domain: str, *, gold: bool) -> dict[str, dict[str, Any]]:
    """What every task of a domain is scored, by its id."""
    found = {}
    for task in await tasks(env, domain):
        await env.reset(7, task["reset"])
        if gold:
            await oracle(env, task)
        found[task["id"]] = await env.call_reward()
    return found


def passed(scores: dict[str, dict[str, Any]], part: str = "score") -> int:
    return sum(score[part] == 1.0 for score in scores.values())


def told(result: ToolResult) -> dict[str, Any]:
    assert not result.is_error, result.text
    assert isinstance(result.structured, dict)
    return result.structured


# The benchmark's numbers


async def test_airline_scores_as_the_benchmark_does(env: Environment) -> None:
    gold, idle = await scores(env, "airline", gold=True), await scores(env, "airline", gold=False)
    assert list(gold) == [str(number) for number in range(50)]
    assert passed(gold) == 50
    assert {int(id) for id, score in idle.items() if score["score"]} == IDLE_PASSES
    for number in CORRECTED:
        steps = await env.call_function("solution", {"domain": "airline", "task": str(number)})
        assert not {"cancel_reservation", "send_certificate"} & {step["name"] for step in steps}
    assert {score["score"] for score in idle.values()} == {0.0, 1.0}
    assert all(score["basis"] == ["database", "communicate"] for score in gold.values())
    assert all(score["not_judged"] == ["nl_assertions"] for score in gold.values())  # never taken for passed
    assert not any("nl_assertions" in score for score in gold.values())


async def test_retail(env: Environment) -> None:
    gold, idle = await scores(env, "retail", gold=True), await scores(env, "retail", gold=False)
    assert (len(gold), passed(gold, "database"), passed(gold)) == (114, 114, 114)
    assert (passed(idle, "database"), passed(idle)) == (11, 7)
    said_nothing = [id for id, score in idle.items() if score["database"] and not score["score"]]
    assert all(idle[id]["communicate"] == 0.0 for id in said_nothing)


async def test_telecom(env: Environment) -> None:
    gold, idle = await scores(env, "telecom", gold=True), await scores(env, "telecom", gold=False)
    assert (len(gold), passed(gold), passed(idle)) == (114, 114, 0)
    assert passed(idle, "environment") == 20  # a human must be asked for, which the database does not show
    assert Counter(tuple(score["basis"]) for score in gold.values()) == {
        ("environment",): 94,
        ("environment", "actions"): 20,
    }


async def test_rollouts_of_instances_that_play_several_tasks(bench: Bench, env: Environment) -> None:
    async def play(env: Episode, task: Task) -> str:
        assert set(task.tools) == {tool["name"].rpartition("/")[2] for tool in await env.list_tools()}
        refused = await env.call_tool("get_order_details", {"order_id": "#W2378156"})
        assert refused.is_error
        return (await env.call_tool("calculate", {"expression": "2 * 3"})).text

    listed = (await tasks(env, "airline", split="test"))[:6]
    async with rollouts(bench.env("tau2"), play, listed, seed=1, concurrency=2, reuse=3) as run:
        played = [one async for one in run]
    assert {one.task.id: one.reward for one in played} == {
        task["id"]: float(int(task["id"]) in IDLE_PASSES) for task in listed
    }
    assert {one.answer for one in played} == {"6.0"}
    assert len({one.provenance.instance for one in played}) < len(played)


# What an agent can reach


async def test_a_task_gives_nothing_away(env: Environment) -> None:
    for domain, size in SIZES.items():
        listed = await tasks(env, domain)
        assert len({task["id"] for task in listed}) == size
        for task in listed:
            assert set(task) == {"id", "instruction", "system", "tools", "metadata", "reset"}
            assert task["reset"] == {"domain": domain, "task": task["id"]}
            assert task["metadata"] == {"domain": domain, "split": "base"}
        # All else is the same for all, and so cannot be about one of them.
        assert len({json.dumps({**task, "id": "", "reset": ""}) for task in listed}) == 1
    for task in await tasks(env, "telecom"):  # whose ids in the benchmark say what is wrong
        kind, _, number = task["id"].partition("-")
        assert kind in {"mms_issue", "mobile_data_issue", "service_issue"}
        assert len(bytes.fromhex(number)) == 5


async def test_tools_are_those_of_the_domain_and_neither_the_owners_nor_the_users(env: Environment) -> None:
    offered = {tool["name"].rpartition("/")[2] for tool in await env.list_tools()}
    functions = {found["name"] for found in (await env.list_functions())["functions"]}
    owners = {"tasks", "solution", "done", "get_task_info", "get_system_prompt", "act_as_user"}
    assert owners <= functions
    assert "send_message" in functions & offered
    assert not owners & offered
    assert not {"toggle_airplane_mode", "make_payment", "score"} & offered
    for domain in SIZES:
        assert set((await tasks(env, domain))[0]["tools"]) <= offered
    await env.reset(1, {"domain": "airline", "task": "0"})
    for tool, arguments in (
        ("solution", {}),
        ("toggle_airplane_mode", {}),
        ("get_order_details", {"order_id": "#W2378156"}),
        ("get_user_details", {"user_id": 7}),
        ("get_user_details", {"user_id": "nobody_1"}),
    ):
        assert (await env.call_tool(tool, arguments)).is_error, tool
    found = next(tool for tool in await env.list_tools() if tool["name"].endswith("/book_reservation"))
    assert found["inputSchema"]["properties"]["cabin"]["enum"] == ["business", "economy", "basic_economy"]
    assert "IATA code" in found["inputSchema"]["properties"]["origin"]["description"]


# Episodes


async def test_nothing_is_left_of_an_episode(env: Environment) -> None:
    begin = {"domain": "airline", "task": "9"}
    await env.reset(1, begin)
    before = (await env.call_tool("get_reservation_details", {"reservation_id": "NQNU5R"})).text
    await env.call_tool("cancel_reservation", {"reservation_id": "NQNU5R"})
    await env.call_tool("transfer_to_human_agents", {"summary": "none"})
    assert told(await env.call_tool("send_message", {"message": "Bye."}))["done"]
    for tool, arguments in (
        ("send_message", {"message": "Are you there?"}),
        ("cancel_reservation", {"reservation_id": "X"}),
    ):
        refused = await env.call_tool(tool, arguments)
        assert (refused.is_error, "the conversation is over" in refused.text) == (True, True)
    assert (await env.call_reward())["score"] == 0.0
    await env.reset(1, begin)
    assert (await env.call_tool("get_reservation_details", {"reservation_id": "NQNU5R"})).text == before
    assert await env.call_function("done") == {"done": False, "reason": "", "turns": 0}
    assert (await env.call_reward())["score"] == 1.0


async def test_a_seed_decides_what_is_drawn(env: Environment) -> None:
    task = (await tasks(env, "telecom"))[0]["reset"]

    async def bill(seed: int) -> str:
        await env.reset(seed, task)
        line = {"customer_id": "C1002", "line_id": "L1004"}
        told_of = await env.call_tool("refuel_data", {**line, "gb_amount": 2.0})
        assert not told_of.is_error, told_of.text
        return (await env.call_tool("get_bills_for_customer", {"customer_id": "C1002"})).text

    first = await bill(5)
    assert await bill(5) == first
    assert await bill(6) != first


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ({"task": "77"}, "airline has no task '77'", "did you mean '7'?"),
        ({"task": "0", "domain": "airlines"}, "there is no domain 'airlines'", "did you mean 'airline'?"),
        ({"task": "what", "domain": "retail"}, "retail has no task 'what'", "the function tasks lists them"),
    ],
)
async def test_what_is_not_there(env: Environment, given: dict[str, str], message: str, hint: str) -> None:
    with pytest.raises(Invalid, match=message) as caught:
        await env.reset(1, given)
    assert caught.value.hint == hint
    with pytest.raises(Invalid, match="no task has begun"):  # and nothing of the last one goes on
        await env.call_reward()
    assert (await env.call_tool("calculate", {"expression": "1 + 1"})).text == "no task has begun"


async def test_a_split_that_is_not_there(env: Environment) -> None:
    assert len(await tasks(env, "telecom", split="full")) == 2285
    with pytest.raises(Invalid, match="airline has no split 'tset'") as caught:
        await tasks(env, "airline", split="tset")
    assert caught.value.hint == "did you mean 'test'?"


# The user


async def test_the_script_tells_its_scenario_and_ends(env: Environment) -> None:
    async def talk() -> list[Any]:
        said = [await env.reset(1, {"domain": "retail", "task": "0"})]
        messages = ("Hello, who are you?", "Shall I exchange both?", "It is done.")
        return said + [told(await env.call_tool("send_message", {"message": message})) for message in messages]

    first = await talk()
    assert await talk() == first
    opening, name, agreed, end = first
    assert opening["message"].startswith("I received my order #W2378156 and wish to exchange")
    assert name == {"message": "I am Yusuf Rossi in zip code 19122. I do not remember my email address.", "done": False}
    assert agreed == {"message": "Yes, please go ahead.", "done": False}
    assert end["done"]
    assert (await env.call_function("done"))["reason"] == "stop"
    info = await env.call_function("get_task_info")
    assert (info["task"], info["domain"], info["message"]) == ("0", "retail", opening["message"])
    assert "<policy>" in await env.call_function("get_system_prompt")


async def test_the_script_uses_its_telephone_when_it_is_asked_to(env: Environment) -> None:
    benchmarks = "[mobile_data_issue]airplane_mode_on|user_abroad_roaming_enabled_off[PERSONA:None]"
    await env.reset(1, {"domain": "telecom", "task": benchmarks})  # by the benchmark's own id, for its owner
    shown = told(await env.call_tool("send_message", {"message": "What does the status bar show?"}))
    assert "Airplane Mode" in shown["message"]
    asked = "Please turn off airplane mode. Then turn on data roaming."
    assert "OFF" in told(await env.call_tool("send_message", {"message": asked}))["message"]
    assert (await env.call_reward())["score"] == 1.0


@asynccontextmanager
async def with_models(bench: Bench, user: Model, judge: Model, **more: str) -> AsyncIterator[Environment]:
    variables = dict(more)
    for role, found in (("USER", user), ("JUDGE", judge)):
        given = {"MODEL": "stand-in", "BASE_URL": found.url, "API_KEY": KEY}
        variables |= {f"TAU2_{role}_{name}": value for name, value in given.items()}
    async with started(bench, environment_variables=variables) as env:
        yield env


def verdict(*met: bool) -> Any:
    return saying(json.dumps({"results": [{"outcome": "?", "reasoning": "so", "met": one} for one in met]}))


async def test_a_model_is_the_user_and_another_the_judge(bench: Bench) -> None:
    speaking = (saying("My data is slow."), calling("toggle_airplane_mode"), saying("Done. ###STOP###"))
    async with model(*speaking) as user, model(verdict(True)) as judge, with_models(bench, user, judge) as env:
        task = next(task for task in await tasks(env, "telecom") if task["id"].startswith("mobile_data"))
        assert await env.reset(3, task["reset"]) == {"message": "My data is slow."}
        answer = await env.call_tool("send_message", {"message": "Please turn off airplane mode."})
        assert told(answer) == {"message": "Done.", "done": True}
        assert (await env.call_function("done"))["reason"] == "stop"
        first, _, last = user.asked
        assert (first["model"], first["temperature"], first["seed"]) == ("stand-in", 0.0, 3)
        assert {tool["function"]["name"] for tool in first["tools"]} >= {"toggle_airplane_mode", "make_payment"}
        assert "<scenario>" in first["messages"][0]["content"]
        assert "Airplane Mode is now OFF" in last["messages"][-1]["content"]
        assert all(f"Bearer {KEY}".encode() in head for head in user.heads)
        assert KEY not in json.dumps([await env.call_function("get_task_info"), task, await env.call_reward()])

        await env.reset(3, {"domain": "airline", "task": "0"})
        assert "tools" not in user.asked[-1]  # this user has none
        judged = await env.call_reward()
        assert (judged["score"], judged["nl_assertions"], judged["not_judged"]) == (1.0, 1.0, [])
        assert "Agent should refuse" in judge.asked[-1]["messages"][1]["content"]
        judge.answers = [verdict(False)]
        judged = await env.call_reward()
        assert (judged["score"], judged["nl_assertions"]) == (1.0, 0.0)  # the task does not count it
        judge.answers = [verdict(True, True)]
        with pytest.raises(ModelError, match="judged 2 of 1 assertions"):
            await env.call_reward()


async def test_a_model_that_fails_is_no_answer_of_the_user(bench: Bench) -> None:
    async with (
        model(saying("Hello.")) as user,
        model(saying("no JSON")) as judge,
        with_models(bench, user, judge) as env,
    ):
        await env.reset(3, {"domain": "airline", "task": "0"})
        user.answers = [(500, {"error": f"the key {KEY} is wrong"})]
        with pytest.raises(ModelError, match="the user model answered with HTTP 500") as caught:
            await env.call_tool("send_message", {"message": "Hello?"})
        assert KEY not in str(caught.value)
        assert (await env.call_function("done"))["turns"] == 0
        with pytest.raises(ModelError, match="the user model answered with HTTP 500"):
            await env.call_reward()  # whoever went on, as a program that plays by URL may: it is no zero
        user.answers = [saying("Here I am.")]
        await env.call_tool("send_message", {"message": "Hello?"})
        user.answers = [(500, {"error": "again"})]
        with pytest.raises(ModelError, match="judge model's answer is not the JSON"):
            await env.call_reward()
        with pytest.raises(ModelError, match="HTTP 500"):
            await env.reset(3, {"domain": "airline", "task": "1"})


@asynccontextmanager
async def dripping() -> AsyncIterator[str]:
    """The address of a model that is never silent for long, and never done."""

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n\r\n")
            while not writer.transport.is_closing():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.05)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()


async def test_a_model_that_takes_too_long_has_failed(bench: Bench) -> None:
    begin = {"domain": "airline", "task": "0"}
    async with dripping() as url:
        given = {"TAU2_USER_MODEL": "slow", "TAU2_USER_BASE_URL": url, "TAU2_USER_TIMEOUT": "0.5"}
        async with started(bench, environment_variables=given) as env:
            with pytest.raises(ModelError, match="the user model did not answer within 0.5 s"):
                await env.reset(3, begin)
        async with started(bench, environment_variables={**given, "TAU2_USER_TIMEOUT": "soon"}) as env:
            with pytest.raises(Invalid, match="TAU2_USER_TIMEOUT is 'soon'"):
                await env.reset(3, begin)


async def test_who_does_not_wait_for_the_answer_is_scored_with_it(bench: Bench) -> None:
    async with (
        model(saying("Hello.")) as user,
        model(verdict(True)) as judge,
        with_models(bench, user, judge, TAU2_USER_TIMEOUT="2") as env,
    ):
        begin = {"domain": "airline", "task": "0"}
        await env.reset(3, begin)
        user.answers = [HANG]
        with pytest.raises(CallTimeout):
            await env.call_tool("send_message", {"message": "Hello?"}, timeout=0.5)
        user.answers = [saying("Nothing more. ###STOP###")]
        assert (await env.call_reward())["score"] == 1.0
        assert await env.call_function("done") == {"done": True, "reason": "stop", "turns": 1}
        assert "agent: Hello?\ncustomer: Nothing more." in judge.asked[-1]["messages"][1]["content"]

        user.answers = [saying("Hello.")]
        await env.reset(3, begin)
        user.answers, user.hanging = [HANG], asyncio.Event()
        asking = asyncio.create_task(env.call_tool("send_message", {"message": "Hello?"}))
        await user.hanging.wait()
        for asked in (env.call_reward(), asking):  # the first while the user is still being asked
            with pytest.raises(ModelError, match="the user model did not answer within 2 s"):
                await asked


# Tasks of the benchmark's own repository


def written(folder: Path, domain: str, criteria: dict[str, Any]) -> None:
    """A task as the repository has them."""
    below = folder / "tau2" / "domains" / domain
    below.mkdir(parents=True)
    instructions = {"domain": domain, "reason_for_call": "You call.", "task_instructions": "Be brief."}
    task = {"id": "corrected", "user_scenario": {"instructions": instructions}, "evaluation_criteria": criteria}
    (below / "tasks.json").write_text(json.dumps([task]))
    (below / "split_tasks.json").write_text(json.dumps({"base": ["corrected"]}))


async def test_tasks_of_a_datasource(bench: Bench, tmp_path: Path) -> None:
    looks = {"action_id": "0", "name": "get_user_details", "arguments": {"user_id": "noah_muller_9847"}}
    counts = {"actions": [looks], "nl_assertions": ["The agent is kind."], "reward_basis": ["DB", "NL_ASSERTION"]}
    written(tmp_path, "airline", counts)
    tmp_path.chmod(0o755)  # an instance is another user
    async with started(bench, datasource=str(tmp_path)) as env:
        found = await env.call_function("tasks", {"domain": "airline"})
        assert [task["id"] for task in found["tasks"]] == ["corrected"]
        assert found["source"]["name"] == "datasource"
        assert await env.reset(1, found["tasks"][0]["reset"]) == {"message": "I call."}
        score = await env.call_reward()
        assert score["basis"] == ["database", "nl_assertions"]
        assert (score["score"], score["not_judged"]) == (1.0, ["nl_assertions"])  # of what could be judged, and said so
        await env.call_tool("send_certificate", {"user_id": "noah_muller_9847", "amount": 50})
        assert (await env.call_reward())["score"] == 0.0
        with pytest.raises(Invalid, match="the datasource has no tasks of retail"):
            await tasks(env, "retail")
