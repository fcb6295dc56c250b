"""Tasks of an environment: asked of a real instance, read from a file, and chosen from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aenv.errors import Invalid, NotFound, Unsupported
from aenv.evals import Taskset, tasksets
from aenv.evals.tasksets import Source
from aenv.rl import Task
from tests.rl.bench import write_env

pytestmark = pytest.mark.usefixtures("benchmark_home")


def made(*ids: str) -> Taskset:
    return Taskset(env="sums", tasks=tuple(Task(id=id) for id in ids), source=Source(name="made"))


def ids(taskset: Taskset) -> list[str]:
    return [task.id for task in taskset]


async def test_an_environment_tells_its_tasks() -> None:
    found = await Taskset.load("sums", {"domain": "large", "most": 3})
    assert ids(found) == ["large-0", "large-1", "large-2"]
    assert (found.env, str(found.source)) == ("sums", "sums 1.2")
    assert found.tasks[1].reset == {"task": "large-1", "domain": "large"}
    assert dict(found.selection) == {"domain": "large", "most": 3}


async def test_texts_are_read_as_what_the_function_takes() -> None:
    found = await Taskset.load("sums", {"domain": "large", "most": "2", "easy": "true"})
    assert dict(found.selection) == {"domain": "large", "most": 2, "easy": True}
    assert len(found) == 2
    assert found.tasks[0].metadata == {"easy": True}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "7", "7"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "7", "7"),
        ({"enum": ["7", "8"]}, "7", "7"),
        ({"type": "array", "items": {"type": "string"}}, '["a", "b"]', ["a", "b"]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
        ({}, "seven", "seven"),
    ],
)
def test_a_text_is_read_by_the_type_it_stands_for(schema: dict, text: str, value: object) -> None:
    assert tasksets._fitting({"names": schema}, "names", text, "sums") == value


@pytest.mark.parametrize(
    ("env", "selection", "kind", "said", "hint"),
    [
        ("words", {}, Unsupported, "has no function 'tasks'", "@register_function def tasks"),
        ("sums", {"domian": "large"}, Invalid, "cannot be chosen by 'domian'", "did you mean 'domain'?"),
        ("sums", {"most": "many"}, Invalid, "most", None),
        ("sums", {"domain": "huge"}, Invalid, "there is no domain 'huge'", "small, large or broken"),
        ("sums", {"most": 0}, NotFound, "no tasks in this selection", None),
    ],
)
async def test_what_does_not_fit_is_said(env: str, selection: dict, kind: type, said: str, hint: str | None) -> None:
    with pytest.raises(kind, match=said) as caught:
        await Taskset.load(env, selection)
    if hint:
        assert hint in str(caught.value.hint)


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("[]", "returned no tasks"),
        ("{'tasks': [{'id': 'a', 'gaol': 1}]}", "task 0 of odd: a task has no 'gaol'"),
        ("{'tasks': [{'id': 'a'}, {'id': 'a'}]}", "two tasks 'a'"),
    ],
)
async def test_a_function_that_tells_something_else(benchmark_home: Path, returned: str, said: str) -> None:
    module = f"from aenv import register_function\n\n@register_function\ndef tasks():\n    return {returned}\n"
    folder = benchmark_home / "envs" / "odd"
    if not folder.exists():
        write_env(benchmark_home, "odd", module)
    (folder / "1.0.0" / "src" / "custom_env.py").write_text(module)
    with pytest.raises(Invalid, match=said):
        await Taskset.load("odd")


def test_a_file_of_tasks(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps({"id": f"t{place}"}) + "\n" for place in range(3)))
    found = Taskset.read("sums", file)
    assert ids(found) == ["t0", "t1", "t2"]
    assert str(found.source) == "tasks.jsonl"


def test_choosing_by_id_and_pattern_keeps_the_order() -> None:
    all = made("air-1", "air-10", "air-2", "[odd]x|y", "a,b")
    assert ids(all.only("air-2,air-1")) == ["air-1", "air-2"]
    assert ids(all.only("air-1*")) == ["air-1", "air-10"]
    assert ids(all.only("[odd]x|y")) == ["[odd]x|y"], "an id is an id before it is a pattern"
    assert ids(all.only("a,b")) == ["a,b"]
    assert all["air-10"].id == "air-10"
    with pytest.raises(NotFound, match="no task 'air-3'") as caught:
        all.only("air-1", "air-3")
    assert "did you mean" in str(caught.value.hint)


def test_order_size_and_digest_follow_from_the_seed() -> None:
    all = made(*(f"t{place}" for place in range(30)))
    assert all.shuffled(1).tasks == all.shuffled(1).tasks
    assert all.shuffled(1).tasks != all.shuffled(2).tasks != all.tasks
    assert sorted(ids(all.shuffled(1))) == sorted(ids(all))
    assert len(all.head(7)) == 7
    assert all.digest == made(*ids(all)).digest
    assert len({all.digest, all.shuffled(1).digest, all.head(29).digest}) == 3


def test_two_parts_have_nothing_in_common() -> None:
    all = made(*(f"t{place}" for place in range(10)))
    train, test = all.split(0.7, seed=3)
    assert (len(train), len(test)) == (7, 3)
    assert sorted(ids(train) + ids(test)) == sorted(ids(all))
    assert ids(all.split(0.7, seed=3)[0]) == ids(train)
    for share in (0.0, 1.0, 1.2):
        with pytest.raises(Invalid, match="leaves nothing"):
            all.split(share)
