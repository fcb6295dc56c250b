"""Rows for trainers: what each format holds, and that every trajectory is in a row or counted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.errors import Invalid
from aenv.models import to_json
from aenv.rl.exporting import FORMATS, export
from aenv.rl.tasks import Task
from aenv.rl.trajectory import Call, Failed, Generation, Scored, Tokens, Trajectory, Turn
from tests.rl import made

FAILED = Failed(kind="sandbox_lost", phase="tool", reason="it is gone")


def rows(format: str, *some: Trajectory) -> list[dict[str, Any]]:
    return list(export(some, format))


def left_out(format: str, *some: Trajectory) -> dict[str, int]:
    found = export(some, format)
    list(found)
    return found.left_out


# Every format


@pytest.mark.parametrize("format", FORMATS)
def test_a_failed_episode_is_left_out_and_counted(format: str) -> None:
    failed = [made.trajectory(outcome=FAILED), made.chat("a", "do", [("", "ls", "x")], "done", outcome=FAILED)]
    found = export(failed, format)
    assert list(found) == []
    assert (found.rows, found.left_out) == (0, {"failed": 2})


@pytest.mark.parametrize("format", FORMATS)
def test_a_dozen_becomes_rows_and_no_gold_answer_is_in_them(format: str) -> None:
    found = export(made.dozen(), format)
    written = [to_json(row) for row in found]
    assert written
    assert len(written) == found.rows
    assert made.GOLD in str(made.dozen())
    assert made.GOLD.encode() not in b"".join(written)
    assert found.left_out["failed"] == 3


@given(st.lists(made.anything, max_size=6), st.sampled_from(sorted(FORMATS)))
def test_every_trajectory_is_in_a_row_or_counted(some: list[Trajectory], format: str) -> None:
    found = export(some, format)
    given = list(found)
    of_one_row = 2 if format == "dpo" else 1
    assert found.rows == len(given)
    assert of_one_row * found.rows + sum(found.left_out.values()) == len(some)
    assert found.left_out.get("failed", 0) == sum(not of.ok for of in some)
    for row in given:
        assert made.GOLD not in json.dumps(row)
        assert math.isfinite(row.get("reward", 0.0))


def test_rows_are_made_as_they_are_read() -> None:
    read = 0

    def some() -> Iterator[Trajectory]:
        nonlocal read
        for of in made.dozen():
            read += 1
            yield of

    found = export(some(), "trl")
    assert read == 0
    next(iter(found))
    assert (read, found.rows) == (1, 1)


def test_counters_are_of_one_reading() -> None:
    found = export(made.dozen(), "openai")
    assert len(list(found)) == len(list(found)) == found.rows == 9
    assert found.left_out == {"failed": 3}


@pytest.mark.parametrize(("format", "hint"), [("open-ai", "did you mean 'openai'?"), ("parquet", "available: dpo")])
def test_an_unknown_format(format: str, hint: str) -> None:
    with pytest.raises(Invalid, match=f"no format '{format}'") as caught:
        export([], format)
    assert hint in (caught.value.hint or "")


# Conversations


def test_openai_has_the_messages_and_the_tools() -> None:
    of = made.chat("a", "Count.", [("I look.", "wc -l x", "3\n")], "Three.")
    (row,) = rows("openai", of)
    assert row == {"messages": of.messages, "tools": [made.TOOL]}


def test_openai_has_only_what_it_knows() -> None:
    said = {"role": "assistant", "content": None, "refusal": None, "reasoning_content": "hm", "audio": {}}
    asked = {"id": "x", "index": 0, "type": "function", "function": {"name": "f", "arguments": "{broken"}}
    of = made.trajectory(messages=[{"role": "user", "content": "do"}, said | {"tool_calls": [asked]}, said])
    (row,) = rows("openai", of)
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{broken"}}
    assert row["messages"] == [
        {"role": "user", "content": "do"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": ""},
    ]
    assert "tools" not in row, "an empty list is refused"


def test_an_agent_that_told_nothing_gets_a_conversation_of_its_calls() -> None:
    task = Task(id="t", instruction="Do it.", system="Be brief.", reward={"answer": made.GOLD})
    first = Call(name="mini-terminal@1.0.0/read.it", arguments={"path": "a"}, result=made.result("A"))
    second = Call(name="write", arguments={}, result=made.result("no", is_error=True), id="own")
    lost = Call(name="write", arguments={})
    of = made.trajectory(task=task, turns=[Turn(calls=[first, second]), Turn(), Turn(calls=[lost])], answer="Done.")
    (row,) = rows("openai", of)
    assert row["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Do it."},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [_call("call_0", "read_it", '{"path": "a"}'), _call("own", "write", "{}")],
        },
        {"role": "tool", "tool_call_id": "call_0", "content": "A"},
        {"role": "tool", "tool_call_id": "own", "content": "no"},
        {"role": "assistant", "content": None, "tool_calls": [_call("call_2", "write", "{}")]},
        {"role": "tool", "tool_call_id": "call_2", "content": "(no result)"},
        {"role": "assistant", "content": "Done."},
    ]


def _call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("format", ["openai", "sharegpt", "trl", "dpo"])
@pytest.mark.parametrize("messages", [[], [{"role": "user", "content": "do"}]])
def test_an_episode_without_a_word_is_counted(format: str, messages: list[dict[str, Any]]) -> None:
    of = made.trajectory(turns=[], messages=messages)
    assert left_out(format, of) == {"nothing said or done": 1}


# ShareGPT


def test_sharegpt() -> None:
    of = made.chat("a", "Count.", [("I look.", "wc -l x", "3\n"), ("", "rm x", "")], "Three.")
    (row,) = rows("sharegpt", of)
    assert row["conversations"] == [
        {"from": "system", "value": "You work in a terminal."},
        {"from": "human", "value": "Count."},
        {
            "from": "function_call",
            "value": '<think>\nI look.\n</think>\n\n{"name": "execute_command", "arguments": {"command": "wc -l x"}}',
        },
        {"from": "observation", "value": "3\n"},
        {"from": "function_call", "value": '{"name": "execute_command", "arguments": {"command": "rm x"}}'},
        {"from": "observation", "value": ""},
        {"from": "gpt", "value": "Three."},
    ]
    assert json.loads(row["tools"]) == [made.TOOL["function"]]


def test_sharegpt_of_calls_at_once_keeps_the_sides_in_turn() -> None:
    calls = [Call(name=name, arguments={}, result=made.result(name.upper())) for name in ("a", "b")]
    (row,) = rows("sharegpt", made.trajectory(turns=[Turn(calls=calls)]))
    human, asked, seen = row["conversations"]
    assert json.loads(asked["value"]) == [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]
    assert (human["from"], seen) == ("human", {"from": "observation", "value": "A\nB"})


def test_sharegpt_without_such_a_role() -> None:
    of = made.trajectory(messages=[{"role": "assistant", "content": "a"}, {"role": "narrator", "content": "b"}])
    assert left_out("sharegpt", of) == {"a role that the format does not have": 1}


# TRL


def test_trl_has_what_stood_before_the_first_word_as_prompt() -> None:
    of = made.chat("a", "Count.", [("I look.", "wc -l x", "3\n")], "Three.", outcome=Scored(score=0.5), group="g")
    (row,) = rows("trl", of)
    assert row["prompt"] == of.messages[:2]
    assert [message["role"] for message in row["completion"]] == ["assistant", "tool", "assistant"]
    assert row["completion"][0]["tool_calls"] == [_call("call_0", "execute_command", {"command": "wc -l x"})]
    assert (row["reward"], row["group"], row["tools"]) == (0.5, "g", [made.TOOL])


def test_trl_keeps_thoughts_and_has_no_nulls() -> None:
    said = {"role": "assistant", "content": None, "reasoning_content": "hm", "refusal": None}
    (row,) = rows("trl", made.trajectory(messages=[said]))
    assert row["completion"] == [{"role": "assistant", "content": "", "reasoning_content": "hm"}]
    assert row["group"] == "list-files", "without a group, the task is one"


# DPO


def test_dpo_pairs_the_best_with_the_worst_of_a_group() -> None:
    found = export(made.dozen(), "dpo")
    pairs = {row["prompt"][1]["content"].split()[0]: row for row in found}
    assert len(pairs) == found.rows == 3
    assert found.left_out == {"failed": 3, "neither best nor worst of its group": 3}


def test_dpo_tells_which_is_better() -> None:
    some = [
        made.chat(str(score), "do", [], f"scored {score}", outcome=Scored(score=score), group="g")
        for score in (0.5, -1.0, 0.75, 0.0)
    ]
    (row,) = rows("dpo", *some)
    assert row == {
        "prompt": some[0].messages[:2],
        "chosen": [{"role": "assistant", "content": "scored 0.75"}],
        "rejected": [{"role": "assistant", "content": "scored -1.0"}],
        "tools": [made.TOOL],
    }


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ({"outcome": Scored(score=1.0)}, "no other reward in its group"),
        ({"outcome": Scored(score=0.0), "group": "other"}, "no other reward in its group"),
        ({"outcome": Scored(score=0.0), "task": Task(instruction="other")}, "another prompt than its pair"),
    ],
)
def test_dpo_without_a_pair(second: dict[str, Any], reason: str) -> None:
    some = [made.trajectory(group="g"), made.trajectory(**{"group": "g", **second})]
    assert left_out("dpo", *some) == {reason: 2}


# Tokens


def turn(
    prompt: list[int] | None,
    completion: list[int] | None,
    logprobs: list[float] | None = None,
    *,
    written: int | None = None,
) -> Turn:
    known = Tokens(prompt=prompt, completion=completion, logprobs=logprobs)
    return Turn(generation=Generation(message=0, tokens=known, completion_tokens=written))


def test_tokens_of_all_turns_are_one_sequence_of_which_only_the_models_count() -> None:
    turns = [turn([1, 2], [3], [-0.5]), turn([1, 2, 3, 8, 9], [4, 5], [-0.25, -1.0])]
    (row,) = rows("tokens", made.trajectory(turns=turns, outcome=Scored(score=0.25), group="g"))
    assert row == {
        "prompt_ids": [1, 2],
        "completion_ids": [3, 8, 9, 4, 5],
        "logprobs": [-0.5, 0.0, 0.0, -0.25, -1.0],
        "loss_mask": [1, 0, 0, 1, 1],
        "reward": 0.25,
        "group": "g",
    }


@pytest.mark.parametrize("logprobs", [None, [-0.5, -0.5]])
def test_log_probabilities_that_are_not_known_of_every_token_are_none(logprobs: list[float] | None) -> None:
    turns = [turn([1], [2], [-0.5]), turn([1, 2], [3], logprobs)]
    (row,) = rows("tokens", made.trajectory(turns=turns))
    assert row["logprobs"] is None
    assert row["loss_mask"] == [1, 1]


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        (list, "no token ids"),
        (lambda: [turn([1], [2]), Turn()], "no token ids"),
        (lambda: [turn(None, [2])], "no token ids"),
        (lambda: [turn([1], None)], "no token ids"),
        (lambda: [turn([1], [2], written=2)], "token ids are missing"),
        (lambda: [turn([1], [])], "nothing said or done"),
        (lambda: [turn([1], [2]), turn([1, 3], [4])], "a turn does not continue the one before"),
        (lambda: [turn([1], [2, 3]), turn([1, 2], [4])], "a turn does not continue the one before"),
    ],
)
def test_tokens_that_make_no_sequence(turns: Callable[[], list[Turn]], reason: str) -> None:
    assert left_out("tokens", made.trajectory(turns=turns())) == {reason: 1}


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=4), st.lists(st.integers(0, 9), min_size=1, max_size=4)))
)
def test_a_sequence_is_the_last_prompt_and_the_last_answer(parts: list[tuple[list[int], list[int]]]) -> None:
    read: list[int] = [0]
    turns = []
    for between, wrote in parts:
        read = read + between
        turns.append(turn(read, wrote, [-1.0] * len(wrote)))
        read = read + wrote
    for row in rows("tokens", made.trajectory(turns=turns)):
        assert row["prompt_ids"] + row["completion_ids"] == read
        assert len(row["completion_ids"]) == len(row["loss_mask"]) == len(row["logprobs"])
        assert sum(row["loss_mask"]) == sum(len(wrote) for _, wrote in parts)
