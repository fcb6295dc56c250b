"""The loop around a model, against a server on a real socket that says what a test tells it to."""

from __future__ import annotations

from typing import Any

import pytest

from aenv.errors import Invalid
from aenv.rl import Episode, OpenAIAgent, Rules, Task, Tokens, rollout
from aenv.rl import models as loop
from tests.rl.bench import Bench
from tests.rl.proofs import has_no_number, is_scored
from tests.rl.standin import CUT, HALF, HANG, Model, calling, calling_all, model, saying

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("rl-models")]
KEY = "sk-very-secret-4711"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits long before a model is asked again."""
    monkeypatch.setattr(loop, "_PAUSE", 0.001)
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


def agent_of(server: Model, **options: Any) -> OpenAIAgent:
    return OpenAIAgent("stand-in", base_url=server.url, **{"retries": 0, **options})


async def test_an_episode(plain_bench: Bench) -> None:
    async with model(calling(content="I work."), calling(id="c2"), saying("All is done.")) as server:
        agent = agent_of(server, system="Be brief.", parameters={"temperature": 0.5}, api_key=KEY)
        trajectory = await rollout(plain_bench.env(), agent, {"instruction": "Work twice."}, seed=3)
    is_scored(trajectory, 2.0)
    assert trajectory.answer == "All is done."
    assert [message["role"] for message in trajectory.messages] == [
        *("system", "user"),
        *("assistant", "tool"),
        *("assistant", "tool"),
        "assistant",
    ]
    assert trajectory.messages[0]["content"] == "Be brief."
    assert trajectory.messages[1]["content"].startswith("Work twice.")
    assert '"seed":3' in trajectory.messages[1]["content"].replace(" ", "")
    assert trajectory.messages[3] == {"role": "tool", "tool_call_id": "c1", "content": "1"}
    assert [len(turn.calls) for turn in trajectory.turns] == [1, 1, 0]
    generation = trajectory.turns[0].generation
    assert generation is not None
    assert (generation.model, generation.finish_reason, generation.message) == ("stand-in-1", "tool_calls", 2)
    assert (generation.prompt_tokens, generation.completion_tokens) == (11, 7)
    assert {tool["function"]["name"] for tool in trajectory.tools} == {"work", "pause"}
    first, second, third = server.asked
    assert (first["model"], first["temperature"]) == ("stand-in", 0.5)
    assert first["tools"] == trajectory.tools
    assert third["messages"] == trajectory.messages[:-1]
    assert len({asked["seed"] for asked in (first, second, third)}) == 3
    assert f"Authorization: Bearer {KEY}".encode() in server.heads[0]
    assert trajectory.provenance.agent == "openai:stand-in"


async def test_several_calls_in_one_turn_are_answered_each(plain_bench: Bench) -> None:
    calls = calling_all(("work", "{}"), ("wrok", "{}"), ("work", "{"), ("work", ""))
    async with model(calls, saying("done")) as server:
        trajectory = await rollout(plain_bench.env(), agent_of(server))
    is_scored(trajectory, 2.0)
    told = {message["tool_call_id"]: message["content"] for message in server.asked[1]["messages"][2:]}
    assert (told["c0"], told["c3"]) == ("1", "2")
    assert "did you mean 'work'" in told["c1"]
    assert "no JSON object" in told["c2"]
    assert len(trajectory.turns) == 2


async def test_the_task_has_its_own_system_prompt(plain_bench: Bench) -> None:
    async with model(saying("done")) as server:
        await rollout(plain_bench.env(), agent_of(server, system="Of all."), {"system": "Of this."})
    assert server.asked[0]["messages"][0] == {"role": "system", "content": "Of this."}


async def test_turns_are_limited_and_the_model_is_not_asked_in_vain(plain_bench: Bench) -> None:
    async with model(calling()) as server:
        trajectory = await rollout(plain_bench.env(), agent_of(server), rules=Rules(max_turns=3))
    is_scored(trajectory, 3.0)
    assert (trajectory.ended, len(server.asked)) == ("max_turns", 3)


async def test_tokens_are_asked_for_and_kept(plain_bench: Bench) -> None:
    answer = saying("done")
    answer["prompt_token_ids"] = [1, 2, 3]
    answer["choices"][0] |= {"token_ids": [4, 5], "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.0}]}}
    answer["usage"] = {"prompt_tokens": 3, "completion_tokens": 2}
    async with model(answer) as server:
        trajectory = await rollout(plain_bench.env(), agent_of(server, tokens=True))
    assert (server.asked[0]["logprobs"], server.asked[0]["return_token_ids"]) == (True, True)
    generation = trajectory.turns[0].generation
    assert generation is not None
    assert generation.tokens == Tokens(prompt=[1, 2, 3], completion=[4, 5], logprobs=[-0.5, -1.0])


class Shaky(Model):
    """Fails at first, so many times, whoever asks."""

    def __init__(self, failures: int, failure: Any) -> None:
        super().__init__([calling(), saying("done")])
        self.failures = failures
        self.failure = failure

    def choose(self, body: dict[str, Any]) -> Any:
        if len(self.asked) <= self.failures:
            return self.failure
        return super().choose(body)


@pytest.mark.parametrize("failure", [(500, {}), (429, {}), (503, b"busy"), (408, {}), CUT, HALF], ids=str)
async def test_what_may_go_well_later_is_asked_again(plain_bench: Bench, failure: Any) -> None:
    async with model(kind=lambda _: Shaky(2, failure)) as server:
        trajectory = await rollout(plain_bench.env(), agent_of(server, retries=2))
        assert len(server.asked) == 4
        is_scored(trajectory, 1.0)
    async with model(kind=lambda _: Shaky(2, failure)) as server:
        trajectory = await rollout(plain_bench.env(), agent_of(server, retries=1))
        assert len(server.asked) == 2
        has_no_number(trajectory, {"model_failed"}, {"model"})


@pytest.mark.parametrize("failure", [(400, {"error": "too long"}), (401, {}), (404, {}), (200, b"garbage")], ids=str)
async def test_what_stays_wrong_is_not_asked_again(plain_bench: Bench, failure: Any) -> None:
    async with model(failure) as server:
        trajectory = await rollout(plain_bench.env(), agent_of(server, retries=5))
    assert len(server.asked) == 1
    has_no_number(trajectory, {"model_failed"}, {"model"})


async def test_a_key_that_a_server_repeats_is_not_kept(plain_bench: Bench) -> None:
    async with model((401, {"error": f"wrong key {KEY}"})) as server:
        trajectory = await rollout(plain_bench.env(), agent_of(server, api_key=KEY))
    failed = has_no_number(trajectory, {"model_failed"}, {"model"})
    assert "wrong key" in failed.reason
    assert KEY not in failed.reason


async def test_a_model_that_hangs(plain_bench: Bench) -> None:
    async with model(calling(), HANG) as server:
        trajectory = await rollout(plain_bench.env(), agent_of(server, timeout=0.5))
        assert "did not answer within" in has_no_number(trajectory, {"model_failed"}, {"model"}).reason
        rules = Rules(turn_timeout=1.5, score_late=True)
        late = await rollout(plain_bench.env(), agent_of(server), rules=rules)
        is_scored(late, 1.0)
        assert late.ended == "time"


async def test_nobody_is_there(plain_bench: Bench) -> None:
    agent = OpenAIAgent("m", base_url="http://127.0.0.1:9/v1", retries=0)
    failed = has_no_number(await rollout(plain_bench.env(), agent), {"model_failed"}, {"model"})
    assert failed.hint == "is base_url right?"


async def test_a_program_around_it_that_goes_on_without_an_answer_has_no_score(plain_bench: Bench) -> None:
    async with model(calling(), (500, {})) as server:
        inner = agent_of(server)

        async def agent(env: Episode, task: Task) -> str:
            try:
                return await inner(env, task)
            except Exception:
                return "gave up"

        trajectory = await rollout(plain_bench.env(), agent)
    has_no_number(trajectory, {"model_failed"}, {"model"})


async def test_a_sandbox_that_is_lost_is_not_the_models_failure(plain_bench: Bench) -> None:
    async with model(calling("work", '{"what": "kill"}'), saying("done")) as server:
        trajectory = await rollout(plain_bench.env(), agent_of(server), rules=Rules(retries=0))
    has_no_number(trajectory, {"sandbox_lost", "network"}, {"tool"})
    assert len(server.asked) == 1


async def test_what_cannot_be_a_server() -> None:
    with pytest.raises(Invalid):
        OpenAIAgent("m", base_url="no-url")
