"""Models asked in tokens: what they read is what they wrote, to the token, and their failures are no score."""

from __future__ import annotations

import json
import re
import shutil
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from aenv.errors import RateLimited
from aenv.rl import Driven, Episode, Generated, Rules, Task, TokenAgent, Trajectory, rollout
from aenv.rl.exporting import export
from aenv.rl.generating import hermes
from tests.rl.bench import Bench, benches
from tests.rl.proofs import has_no_number, is_scored
from tests.support import ROOT

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.xdist_group("rl-driven")]
TASK: dict[str, Any] = {"instruction": "Press the key that is shown.", "reset": {"digit": 3}}
START, END, PAIR = 256, 257, 258
"""Of a message; and one token for what are two otherwise, so that a text can be written in several ways."""
TOKENS = {"<|im_start|>": START, "<|im_end|>": END, "pr": PAIR}


class Bytes:
    """A tokenizer: a token is a byte, but for those that begin and end a message, and for ``pr``."""

    eos_token: Any = "<|im_end|>"

    def apply_chat_template(self, conversation: Any, *, tools: Any = None, **kwargs: Any) -> str:
        assert kwargs.pop("add_generation_prompt")
        assert not kwargs.pop("tokenize")
        shown = [f"<|im_start|>system\n{json.dumps(tools)}{kwargs or ''}<|im_end|>\n"] if tools else []
        for message in conversation:
            calls = [f"<tool_call>{json.dumps(call['function'])}</tool_call>" for call in message.get("tool_calls", ())]
            shown.append(f"<|im_start|>{message['role']}\n{message['content']}{''.join(calls)}<|im_end|>\n")
        return "".join(shown) + "<|im_start|>assistant\n"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        parts = re.split(r"(<\|im_start\|>|<\|im_end\|>|pr)", text)
        return [token for part in parts for token in ([TOKENS[part]] if part in TOKENS else part.encode())]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        kept = [b"pr" if token == PAIR else bytes([token]) for token in token_ids if token not in (START, END)]
        return b"".join(kept).decode(errors="replace")


def press(key: int) -> str:
    """What a model writes to press a key."""
    return f'<tool_call>\n{{"name": "press", "arguments": {{"key": {key}}}}}\n</tool_call>'


class Model:
    """Writes what it is told to, a token for each byte, and says what it read."""

    def __init__(self, *says: str | Generated | Exception) -> None:
        self.says = list(says)
        self.read: list[list[int]] = []

    async def __call__(self, ids: list[int]) -> Generated:
        self.read.append(list(ids))
        ids.clear()  # what a server does with its list is its own affair
        said = self.says[len(self.read) - 1]
        if isinstance(said, Exception):
            raise said
        return said if isinstance(said, Generated) else Generated(written(said))


def written(text: str) -> list[int]:
    return [*text.encode(), END]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    async with benches() as found:
        shutil.copytree(ROOT / "examples" / "06-keypad", found.home / "envs" / "keypad" / "1.0.0")
        yield found


async def played(bench: Bench, model: Model, rules: Rules | None = None, **options: Any) -> Trajectory:
    return await rollout(bench.env("keypad"), TokenAgent(model, Bytes(), **options), TASK, rules=rules)


def tokens(of: Trajectory) -> list[tuple[list[int], list[int]]]:
    """What was read and written, turn by turn."""
    found = [turn.generation.tokens for turn in of.turns if turn.generation]
    return [(one.prompt or [], one.completion or []) for one in found if one]


async def test_an_episode_to_the_token(bench: Bench) -> None:
    first, last = f"I press. {press(3)}", "Done."
    logprobs = [-0.5] * len(written(first)), [-0.25] * len(written(last))
    model = Model(Generated(written(first), logprobs[0]), Generated(written(last), logprobs[1]))
    trajectory = await played(bench, model, system="Be brief.", template={"enable_thinking": False})
    is_scored(trajectory, 1.0)
    assert (trajectory.answer, trajectory.ended) == ("Done.", "done")
    read = tokens(trajectory)
    assert [prompt for prompt, _ in read] == model.read
    opening, following = model.read
    begun = Bytes().decode(opening, skip_special_tokens=True)
    assert "enable_thinking" in begun
    assert '"name": "press"' in begun
    assert begun.endswith("Be brief.\nuser\nPress the key that is shown.\n\nThe display shows 3.\nassistant\n")
    assert PAIR not in written(first), "the model writes it in two tokens, and a tokenizer in one"
    assert PAIR in Bytes().encode(first, add_special_tokens=False)
    told = "\n<|im_start|>tool\nYou pressed 3.<|im_end|>\n<|im_start|>assistant\n"
    between = Bytes().encode(told, add_special_tokens=False)
    assert following == opening + written(first) + between
    message = trajectory.messages[2]
    assert message["content"] == "I press."
    assert message["tool_calls"][0]["function"] == {"name": "press", "arguments": '{"key":3}'}
    assert [call.id for call in trajectory.calls] == ["call_0"]
    (row,) = export([trajectory], "tokens")
    assert row["prompt_ids"] == opening
    assert row["completion_ids"] == written(first) + between + written(last)
    assert row["loss_mask"] == [1] * len(written(first)) + [0] * len(between) + [1] * len(written(last))
    assert row["logprobs"] == logprobs[0] + [0.0] * len(between) + logprobs[1]
    await bench.empty()


async def test_an_end_that_the_model_did_not_write_is_written_for_it(bench: Bench) -> None:
    without = list(press(3).encode())
    model = Model(Generated(without), "Done.")
    is_scored(await played(bench, model), 1.0)
    assert model.read[1][: len(model.read[0]) + len(without)] == model.read[0] + without
    assert model.read[1][len(model.read[0]) + len(without)] == END


async def test_several_calls_and_turns_have_each_an_id_of_their_own(bench: Bench) -> None:
    model = Model(press(3) + press(9), "<tool_call>press 3</tool_call><tool_call>[3]</tool_call>" + press(3), "Done.")
    trajectory = await played(bench, model)
    is_scored(trajectory, 1.0)
    results = {found["tool_call_id"]: found["content"] for found in trajectory.messages if found["role"] == "tool"}
    assert list(results) == [f"call_{number}" for number in range(5)]
    assert results["call_0"] == results["call_4"] == "You pressed 3."
    assert "keys 0 to 4" in results["call_1"]
    assert "there is no tool" in results["call_2"]
    assert "there is no tool" in results["call_3"]
    assert len(trajectory.calls) == 3
    for (prompt, wrote), (following, _) in zip(tokens(trajectory), tokens(trajectory)[1:], strict=False):
        assert following[: len(prompt) + len(wrote)] == prompt + wrote
    assert len(list(export([trajectory], "tokens"))) == 1


async def test_what_was_cut_calls_no_tool_and_ends_the_episode(bench: Bench) -> None:
    model = Model(Generated(list(press(3).encode()), finish_reason="length"))
    trajectory = await played(bench, model)
    is_scored(trajectory, 0.0)
    assert trajectory.calls == []
    assert "tool_calls" not in trajectory.messages[-1]
    assert trajectory.turns[0].generation is not None
    assert trajectory.turns[0].generation.finish_reason == "length"


async def test_a_sequence_that_is_long_enough_ends_it(bench: Bench) -> None:
    model = Model(press(3), press(3))
    trajectory = await played(bench, model, max_tokens=10)
    is_scored(trajectory, 1.0)
    assert len(model.read) == 1


async def test_no_model_is_asked_for_a_turn_that_may_not_be(bench: Bench) -> None:
    model = Model(press(3), press(3))
    trajectory = await played(bench, model, Rules(max_turns=1))
    is_scored(trajectory, 1.0)
    assert (trajectory.ended, len(model.read)) == ("max_turns", 1)


async def test_numbers_of_any_kind_are_kept_as_numbers(bench: Bench) -> None:
    ids, logprobs = array("q", written(press(3))), array("f", [-1] * len(written(press(3))))
    trajectory = await played(bench, Model(Generated(ids, logprobs), "Done."))
    is_scored(trajectory, 1.0)  # also after it was written and read
    assert tokens(trajectory)[0][1] == written(press(3))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (RuntimeError("the server is gone"), "RuntimeError: the server is gone"),
        (RateLimited("too many"), "too many"),
        (Generated([1, 2, 3], [-1.0]), "3 ids came with 1 log-probabilities"),
        (Generated(["a"]), "invalid literal"),  # type: ignore[list-item]
    ],
    ids=["raised", "ours", "logprobs", "ids"],
)
@pytest.mark.parametrize("catching", [False, True])
async def test_a_model_that_does_not_answer_is_no_score(bench: Bench, said: Any, why: str, catching: bool) -> None:
    agent = TokenAgent(Model(press(3), said), Bytes())

    async def catches(env: Episode, task: Task) -> str:
        try:
            return await agent(env, task)
        except Exception:
            return "never mind"

    trajectory = await rollout(bench.env("keypad"), catches if catching else agent, TASK)
    failed = has_no_number(trajectory, {"model_failed"}, {"model"})
    assert why in failed.reason
    assert failed.turn == 0
    await bench.empty()


async def test_a_sandbox_that_is_lost_is_not_the_models_failure(bench: Bench) -> None:
    kill = '<tool_call>{"name": "work", "arguments": {"what": "kill"}}</tool_call>'
    model = Model(kill, "Done.")
    trajectory = await rollout(bench.env(), TokenAgent(model, Bytes()), rules=Rules(retries=0))
    has_no_number(trajectory, {"sandbox_lost"}, {"tool"})
    assert len(model.read) == 1


async def test_a_template_that_hides_what_was_said_is_refused(bench: Bench) -> None:
    class Hiding(Bytes):
        def apply_chat_template(self, conversation: Any, *, tools: Any = None, **kwargs: Any) -> str:
            return "nothing"

    trajectory = await rollout(bench.env("keypad"), TokenAgent(Model(press(3)), Hiding()), TASK)
    assert "chat template" in has_no_number(trajectory, {"invalid"}, {"agent"}).reason


async def test_it_plays_what_is_driven_from_outside(bench: Bench) -> None:
    driven = Driven(bench.env("keypad"), TASK)
    await driven.begin()
    assert await TokenAgent(Model(press(3), "Done."), Bytes())(driven.episode, driven.task) == "Done."
    trajectory = await driven.end()
    is_scored(trajectory, 1.0)
    assert len(tokens(trajectory)) == 2
    await bench.empty()


async def test_what_is_a_call_and_what_is_none() -> None:
    words, calls = hermes(f"first {press(1)} then <tool_call>no json</tool_call> {press(2)} <tool_call> cut")
    assert words.split() == ["first", "then", "<tool_call>", "cut"]
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("press", '{"key":1}'),
        ("", "no json"),
        ("press", '{"key":2}'),
    ]
    assert hermes('<tool_call>{"name": "look"}</tool_call>')[1][0].function.arguments == "{}"
    assert hermes("nothing") == ("nothing", [])
