"""Trajectories made by hand: a dozen of a terminal in groups, one whose every text is hostile, and any at all."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from aenv.models import ToolResult
from aenv.rl.tasks import Task
from aenv.rl.trajectory import (
    Call,
    Component,
    Failed,
    Generation,
    Lineage,
    Provenance,
    Scored,
    Tokens,
    Trajectory,
    Turn,
)

GOLD = "the-gold-answer-4711"
"""In the arguments of every reward here, and nowhere else."""
SCRIPT = "</script><script>document.title = 'PWNED'</script><img src=x onerror=\"document.title = 'PWNED'\">"
ANSI = "\x1b[2J\x1b]0;PWNED\x07\x9b31m\r\x08\u202e"
HOSTILE = f"{SCRIPT}<!-- script --><!-- data -->{ANSI}\u2028&amp;\x00"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="  # 1 x 1
TOOL = {
    "type": "function",
    "function": {
        "name": "execute_command",
        "description": "Run a command in a shell.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
_DIGEST = "sha256:" + "4d6f1c" * 10 + "ab12"


def result(text: str, *, is_error: bool = False, structured: Any = None) -> ToolResult:
    return ToolResult(content=[{"type": "text", "text": text}], is_error=is_error, structured=structured)


def trajectory(**given: Any) -> Trajectory:
    """A scored one of one call, but for what is given."""
    call = Call(name="execute_command", arguments={"command": "ls"}, result=result("a.txt"), at=0.5, seconds=0.25)
    usual: dict[str, Any] = {
        "id": "e1",
        "env": "mini-terminal",
        "task": Task(id="list-files", instruction="List the files.", reward={"answer": GOLD}),
        "outcome": Scored(score=1.0),
        "ended": "done",
        "turns": [Turn(calls=[call])],
    }
    return Trajectory(**{**usual, **given})


def chat(
    id: str,
    instruction: str,
    commands: list[tuple[str, str, str]],
    last: str,
    *,
    tokens: bool = False,
    **given: Any,
) -> Trajectory:
    """One of a model: for each command, what it said before, the command itself and what came back; then its answer."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You work in a terminal."},
        {"role": "user", "content": instruction},
    ]
    turns: list[Turn] = []
    read = list(range(100, 120))
    at = 0.9

    def said(message: dict[str, Any], calls: list[Call]) -> None:
        nonlocal read
        messages.append(message)
        wrote = [1000 + len(turns) * 10 + place for place in range(4)]
        known = Tokens(prompt=read, completion=wrote, logprobs=[-0.1, -0.2, -0.3, -0.4]) if tokens else None
        spoken = Generation(
            message=len(messages) - 1,
            model="qwen3-8b",
            finish_reason="tool_calls" if calls else "stop",
            seconds=1.1 + len(turns) * 0.3,
            prompt_tokens=412 + 160 * len(turns),
            completion_tokens=len(wrote) if tokens else 38 + 7 * len(turns),
            tokens=known,
        )
        turns.append(Turn(calls=calls, generation=spoken))
        read = [*read, *wrote, 7, 8]

    for number, (words, command, output) in enumerate(commands):
        failed = output.startswith("error: ")
        structured = None if failed else {"returncode": 0, "stdout": output, "stderr": "", "truncated": False}
        call = Call(
            name="execute_command",
            arguments={"command": command},
            result=result(output, is_error=failed, structured=structured),
            id=f"call_{number}",
            at=at,
            seconds=0.02 + 0.31 * number,
        )
        asked = {"name": call.name, "arguments": json.dumps(call.arguments)}
        said(
            {
                "role": "assistant",
                "content": words or None,
                "tool_calls": [{"id": call.id, "type": "function", "function": asked}],
            },
            [call],
        )
        messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
        at += 2.2
    if last:
        said({"role": "assistant", "content": last}, [])
    usual: dict[str, Any] = {
        "ended": "done",
        "id": id,
        "env": "mini-terminal@1.0.0",
        "task": Task(id="task", instruction=instruction, system="You work in a terminal.", reward={"gold": GOLD}),
        "outcome": Scored(score=1.0, components={"reward": Component(score=1.0)}),
        "messages": messages,
        "turns": turns,
        "tools": [TOOL],
        "answer": last or None,
        "began_at": 1767700000.0,
        "provenance": Provenance(
            env="mini-terminal@1.0.0",
            digest=_DIGEST,
            task_digest=_DIGEST[7:],
            tools_digest=_DIGEST,
            agent="aenv.rl.models:OpenAIAgent",
            instance=f"mini-terminal-{id[:6]}",
            versions={"aenv": "0.9.0", "python": "3.11.9"},
        ),
    }
    return Trajectory(**{**usual, **given})


_TASKS: Mapping[str, tuple[str, list[tuple[str, str, str]], str]] = {
    "count-errors": (
        "How many lines of app.log report an error? Write the number, and nothing else, to answer.txt.",
        [
            (
                "I look at the log first, to see how an error is written.",
                "head -4 app.log",
                "2026-01-06 08:00:01 INFO  start\n2026-01-06 08:00:02 ERROR disk /dev/sdb is full\n"
                "2026-01-06 08:00:02 WARN  retry in 5 s\n2026-01-06 08:00:07 ERROR disk /dev/sdb is full\n",
            ),
            ("Errors are marked with ERROR in the third column.", "grep -c ' ERROR ' app.log | tee answer.txt", "17\n"),
        ],
        "app.log has 17 lines that report an error, and answer.txt says so.",
    ),
    "fix-tests": (
        "The tests of the project in ~/shop fail. Mend the code, not the tests.",
        [
            (
                "",
                "cd ~/shop && python -m pytest -q 2>&1 | tail -3",
                "FAILED test_cart.py::test_total - assert 9 == 10\n1 failed, 6 passed in 0.12s\n",
            ),
            ("The total is off by one.", "sed -n 1,9p cart.py", "error: sed: can't read cart.py: No such file"),
            (
                "",
                "sed -i 's/range(1, n)/range(n)/' src/cart.py && python -m pytest -q | tail -1",
                "7 passed in 0.11s\n",
            ),
        ],
        "All seven tests pass: the loop left out the first line of the cart.",
    ),
    "find-secret": (
        "A password is somewhere below /srv. Print the path of the file that holds it.",
        [("", "grep -rl password /srv | head", "/srv/old/notes.md\n/srv/web/.env\n")],
        "/srv/web/.env",
    ),
}
_PASSED: Mapping[str, list[int | Failed]] = {
    "count-errors": [8, 8, 2, 6],
    "fix-tests": [
        7,
        3,
        Failed(
            kind="sandbox_lost", phase="tool", reason="the instance ended with exit code 137", hint="try again", turn=0
        ),
        0,
    ],
    "find-secret": [
        6,
        Failed(kind="model_failed", phase="model", reason="the server answered 503 four times", turn=0),
        8,
        Failed(kind="sandbox_lost", phase="create", reason="the node went away"),
    ],
}
"""By the task: how many of eight checks each sample passed, or how it failed."""


def dozen() -> list[Trajectory]:
    """Three tasks with four samples each, of which three failed."""
    found = []
    for task, (instruction, commands, last) in _TASKS.items():
        for sample, passed in enumerate(_PASSED[task]):
            failed = isinstance(passed, Failed)
            number = len(found)
            create, model, tool = 0.4 + 0.05 * number, 2.9 + 0.6 * sample, 0.5 + 0.4 * sample
            seconds = {"create": create, "reset": 0.05, "agent": model + tool + 0.3, "reward": 0.4, "release": 0.1}
            seconds |= {"model": model, "tool": tool, "total": create + model + tool + 0.85}
            outcome = passed if isinstance(passed, Failed) else _weighed(passed)
            found.append(
                chat(
                    f"{number:02d}c4e9a17f{number:02d}",
                    instruction,
                    commands[: 1 if failed else len(commands)],
                    "" if failed else last,
                    tokens=True,
                    task=Task(id=task, instruction=instruction, reward={"gold": GOLD}),
                    outcome=outcome,
                    group=task,
                    sample=sample,
                    seed=20260101,
                    seconds=seconds,
                )
            )
    return found


def _weighed(passed: int) -> Scored:
    parts = {
        "checks": Component(score=passed / 8, weight=0.8, details={"passed": passed, "of": 8}),
        "brevity": Component(score=1.0 if passed == 8 else 0.5, weight=0.2),
    }
    return Scored(score=sum(part.score * part.weight for part in parts.values()), components=parts)


def hostile() -> Trajectory:
    """Every text of it would do harm to a reader that let it."""
    image = {"type": "image", "mimeType": "image/png", "data": PIXEL}
    drawing = base64.b64encode(b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>").decode()
    answer = ToolResult(
        content=[
            {"type": "text", "text": HOSTILE},
            image,
            {"type": "image", "mimeType": "image/svg+xml", "data": drawing},
            {"type": "image", "mimeType": "image/png", "data": '" onerror="alert(1)'},
            {"no": "type"},
        ],
        is_error=True,
    )
    return chat(
        f"bad {SCRIPT}",
        f"instruction {HOSTILE}",
        [],
        f"answer {HOSTILE}",
        env=f"env {HOSTILE}",
        group=f"group {HOSTILE}",
        task=Task(id=f"task {HOSTILE}", instruction=f"instruction {HOSTILE}", reward={"gold": GOLD, "x": HOSTILE}),
        outcome=Failed(kind=f"kind {HOSTILE}", phase="tool", reason=f"reason {HOSTILE}", hint=HOSTILE),
        retried=[Failed(kind="network", phase="create", reason=HOSTILE)],
        messages=[
            {"role": HOSTILE, "content": HOSTILE},
            {"role": "tool", "tool_call_id": ["no", "text"], "content": {HOSTILE: 1}},
            {"content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}, 7, None]},
            {"role": "assistant", "content": HOSTILE, "tool_calls": [7, {"function": {"name": HOSTILE}}]},
        ],
        turns=[
            Turn(
                calls=[
                    Call(name=HOSTILE, arguments={HOSTILE: HOSTILE}, result=answer),
                    Call(name="lost", arguments={}),
                ],
                generation=Generation(message=3, model=HOSTILE, finish_reason=HOSTILE),
                rewards={HOSTILE: Component(score=0.5, details=HOSTILE)},
            ),
            Turn(generation=Generation(message=99)),
        ],
        observation={HOSTILE: [HOSTILE]},
        answer=HOSTILE,
        provenance=Provenance(env=HOSTILE, versions={HOSTILE: HOSTILE}),
        lineage=Lineage(parent=HOSTILE, relation=HOSTILE),
        seconds={HOSTILE: 1.0, "total": 2.0},
    )


# Any at all

_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=5), part, max_size=3),
    max_leaves=8,
)
_texts = st.text(max_size=40) | st.just(HOSTILE)
_blocks = st.fixed_dictionaries({"type": st.just("text"), "text": _texts}) | st.dictionaries(
    st.sampled_from(["type", "text", "data", "mimeType"]), _values, max_size=3
)
_results = st.builds(ToolResult, content=st.lists(_blocks, max_size=3), is_error=st.booleans(), structured=_values)
_calls = st.builds(
    Call,
    name=_texts,
    arguments=st.dictionaries(st.text(max_size=5), _values, max_size=3),
    result=st.none() | _results,
    id=st.sampled_from(["", "a", "b"]),
)
_asked = st.fixed_dictionaries(
    {
        "id": st.sampled_from(["a", "b"]),
        "function": st.fixed_dictionaries({"name": _texts, "arguments": _texts | _values}),
    }
)
_messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "else"]), "content": _values},
    optional={
        "tool_call_id": _values,
        "tool_calls": st.lists(_asked, max_size=2) | _values,
        "reasoning_content": _texts,
    },
)
_tokens = st.builds(
    Tokens,
    prompt=st.none() | st.lists(st.integers(0, 3), max_size=4),
    completion=st.none() | st.lists(st.integers(0, 3), max_size=3),
    logprobs=st.none() | st.lists(st.floats(-9, 0), max_size=3),
)
_turns = st.builds(
    Turn,
    calls=st.lists(_calls, max_size=2),
    generation=st.none() | st.builds(Generation, message=st.integers(-1, 5), tokens=st.none() | _tokens),
)
_outcomes = st.builds(Scored, score=st.sampled_from([0.0, 0.5, 1.0])) | st.builds(
    Failed, kind=_texts, phase=st.just("tool"), reason=_texts
)
anything = st.builds(
    Trajectory,
    id=_texts,
    env=_texts,
    task=st.builds(Task, id=st.sampled_from(["", "a"]), instruction=_texts, reward=st.just({"gold": GOLD})),
    outcome=_outcomes,
    group=st.sampled_from(["", "g", "h"]),
    messages=st.lists(_messages, max_size=4),
    turns=st.lists(_turns, max_size=3),
    observation=_values,
    answer=_values,
)
"""Whatever a file may hold: most of it makes no sense, and all of it is a trajectory."""
