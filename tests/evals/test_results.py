"""Whole evaluations from a program: what is played, kept and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from aenv.errors import Invalid, NotFound
from aenv.evals import Evaluation, Taskset, compare, evaluate
from aenv.evals.results import natural
from aenv.rl import Failed, OpenAIAgent, Rules, Scored, Task, Trajectory, read
from aenv.rl.runs import Asked
from aenv.rl.trajectory import Component
from tests.rl import made
from tests.rl.standin import USAGE, calling, model, saying

BROKEN = Failed(kind="agent_failed", phase="agent", reason="cut")
ASKED = Asked(env="sums", agent="made", tasks="0", n=1, seed=0, rewards={})
FAILED = Failed(kind="network", phase="tool", reason="cut")


def of(scores: dict[str, list[float | None]], **how: Any) -> Evaluation:
    return Evaluation(ASKED, trajectories(scores), **how)


def trajectories(scores: dict[str, list[float | None]]) -> list[Trajectory]:
    return [
        made.trajectory(
            id=f"{id}/{place}",
            task=Task(id=id),
            group=id,
            sample=place,
            outcome=FAILED if score is None else Scored(score=score),
        )
        for id, samples in scores.items()
        for place, score in enumerate(samples)
    ]


@pytest.mark.usefixtures("benchmark_home")
async def test_an_evaluation_from_a_program(tmp_path: Path) -> None:
    tasks = await Taskset.load("sums", {"domain": "large"})
    found = await evaluate("sums", "oracle", tasks.head(5), folder=tmp_path / "run", concurrency=2)
    shown = found.shown()
    assert {name: shown[name] for name in ("env", "agent", "tasks", "passed", "failed", "score")} == {
        "env": "sums@1.0.0",
        "agent": "oracle",
        "tasks": 5,
        "passed": 5,
        "failed": 0,
        "score": 1.0,
    }
    assert shown["taskset"] == {
        "digest": tasks.head(5).digest,
        "source": "sums 1.2",
        "selection": {"domain": "large"},
    }
    played = list(read(tmp_path / "run"))
    assert len({trajectory.provenance.instance for trajectory in played}) <= 2, "instances play several"
    again = await evaluate("sums", "oracle", tasks.head(5), folder=tmp_path / "run", resume=True)
    assert msgspec.json.encode(again.shown()) == msgspec.json.encode(shown)
    with pytest.raises(Invalid, match="its settings was"):
        await evaluate("sums", "oracle", tasks.head(5), folder=tmp_path / "run", resume=True, rules=Rules(max_turns=3))
    kept = Evaluation.read(tmp_path / "run")
    assert kept.shown() == shown


@pytest.mark.parametrize(
    ("kind", "phase", "counts"),
    [
        ("agent_failed", "agent", True),
        ("episode_timeout", "agent", True),
        ("turn_timeout", "tool", True),
        ("out_of_memory", "tool", True),
        ("turn_timeout", "model", False),
        ("model_failed", "model", False),
        ("out_of_memory", "reward", False),
        ("sandbox_lost", "tool", False),
        ("abandoned", "agent", False),
    ],
)
def test_what_the_agent_failed_in_is_a_zero_and_what_the_platform_did_is_none(kind, phase, counts):
    failed = made.trajectory(id="b", group="b", outcome=Failed(kind=kind, phase=phase, reason="cut"))
    passed = made.trajectory(id="a", group="a", outcome=Scored(score=1.0))
    found = Evaluation(ASKED, [passed, failed])
    assert found.score is not None
    assert (found.score.value, found.counted) == ((0.5, 2) if counts else (1.0, 1))
    assert (found.agent_failed, found.failed) == ((1, 0) if counts else (0, 1))


@pytest.mark.parametrize("threshold", [1.0, 0.0, -5.0])
def test_what_the_agent_failed_in_passes_at_no_threshold(threshold: float) -> None:
    assert Evaluation(ASKED, [made.trajectory(outcome=BROKEN)], threshold=threshold).passed == 0
    worst = made.trajectory(id="b", sample=1, outcome=Scored(score=-5.0))
    found = Evaluation(ASKED, [made.trajectory(outcome=BROKEN), worst], threshold=threshold)
    assert found.passed == (threshold == -5.0), "the one that has a score"


def broken(id: str) -> Trajectory:
    return made.trajectory(id=f"{id}/broken", task=Task(id=id), group=id, outcome=BROKEN)


def test_to_break_down_is_no_better_than_the_worst_that_was_played() -> None:
    honest = of({"a": [1.0], "b": [-3.0]})
    breaking = Evaluation(ASKED, [*trajectories({"a": [1.0]}), broken("b")])
    assert breaking.scores == [[1.0], [0.0]]
    mixed = Evaluation(ASKED, [*trajectories({"a": [1.0], "b": [-3.0, -1.0]}), broken("c")])
    assert mixed.scores == [[1.0], [-3.0, -1.0], [-3.0]]
    found = compare(honest, breaking)
    assert (found.before, found.after, found.better) == (-1.0, -1.0, 0), "the lowest of both runs"
    assert compare(breaking, honest).worse == 0


@pytest.mark.usefixtures("benchmark_home")
async def test_without_a_folder_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def nobody(env: object, task: object) -> None:
        """Does nothing."""

    found = await evaluate("sums", nobody, n=2, ks=(2,))
    assert (found.asked.agent.rpartition(".")[2], found.passed, len(found.results)) == ("nobody", 0, 4)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("benchmark_home")
async def test_a_model_with_what_it_read_and_wrote() -> None:
    tasks = (await Taskset.load("sums")).head(2)
    async with model(calling("submit", '{"value": 1}'), saying("done")) as server:
        found = await evaluate("sums", OpenAIAgent("m", base_url=server.url), tasks, rules=Rules(max_turns=5))
    shown = found.shown()
    assert (shown["agent"], shown["failed"], shown["turns"], shown["calls"]) == ("openai:m", 0, 4, 2)
    assert shown["tokens"] == {"prompt": 4 * USAGE["prompt_tokens"], "completion": 4 * USAGE["completion_tokens"]}
    assert {"create", "reset", "model", "tool", "reward"} <= set(shown["seconds"])


def test_failures_are_apart_from_zeros() -> None:
    found = of({"a": [1.0, None], "b": [0.0, 0.0], "c": [None, None]}, ks=(1, 2))
    shown = found.shown()
    assert (shown["episodes"], shown["passed"], shown["failed"]) == (6, 1, 3)
    assert shown["failures"] == {"network": 3}
    assert shown["score"] == 0.5
    assert shown["pass_rate"]["tasks"] == 2
    assert (shown["pass@k"]["2"]["value"], shown["pass@k"]["2"]["left_out"]) == (0.0, 2)
    assert [result["scores"] for result in shown["results"]] == [[1.0, None], [0.0, 0.0], [None, None]]
    none = of({"c": [None]}).shown()
    assert (none["score"], none["interval"], none["passed"], none["failed"]) == (None, None, 0, 1)


def test_order_is_that_of_the_tasks_or_as_people_count() -> None:
    scores: dict[str, list[float | None]] = {"t10": [1.0], "t2": [1.0], "t1": [1.0]}
    assert [result.id for result in of(scores).results] == ["t1", "t2", "t10"]
    assert [result.id for result in of(scores, order=["t2", "t10"]).results] == ["t2", "t10", "t1"]
    assert sorted(["a10", "a9", "10", "9", "²"], key=natural) == ["9", "10", "a9", "a10", "²"]


def test_what_rewards_tell_beside_the_score() -> None:
    told = [
        {"score": 1.0, "database": 1.0, "found": True, "why": "so", "not_judged": []},
        {"score": 0.5, "database": 0.5, "not_judged": ["manners"], "odd": float("inf")},
        None,
    ]
    some = [
        made.trajectory(
            sample=place, outcome=Scored(score=0.0, components={"r": Component(score=0.0, details=details)})
        )
        for place, details in enumerate(told)
    ]
    shown = Evaluation(ASKED, some).shown()
    assert shown["parts"] == {"database": 0.75, "found": 1.0}
    assert shown["not_judged"] == 1


def test_the_threshold_decides_what_passes() -> None:
    found = of({"a": [0.4, 0.6, 0.9]}, threshold=0.6)
    assert found.passed == 2
    assert found.passes(found.results[0])
    assert not of({"a": [1.0, 0.0]}).passes(of({"a": [1.0, 0.0]}).results[0]), "half is not more than half"


def test_two_evaluations_task_by_task() -> None:
    first = of({"a": [1.0], "b": [0.0], "c": [0.5], "d": [None], "e": [1.0]})
    second = of({"a": [0.0], "b": [1.0], "c": [0.75], "d": [1.0], "f": [1.0]})
    found = compare(first, second)
    assert (found.tasks, found.better, found.worse) == (3, 2, 1)
    assert found.difference == pytest.approx((-1 + 1 + 0.25) / 3)
    assert found.interval[0] <= found.difference <= found.interval[1]
    assert ([pair.id for pair in found.won], [pair.id for pair in found.lost]) == (["b"], ["a"])
    assert sorted(found.left_out) == ["d", "e", "f"]
    assert found.changed == []
    low, high = compare(first, first).interval
    assert low == -high < 0, "so few tasks may all be alike by chance"


def test_tasks_that_changed_are_named() -> None:
    changed = [made.trajectory(task=Task(id="a", instruction="Another."), group="a")]
    assert compare(of({"a": [1.0]}), Evaluation(ASKED, changed)).changed == ["a"]


def test_runs_of_nothing_in_common(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="no task in common"):
        compare(of({"a": [1.0]}), of({"b": [1.0]}))
    with pytest.raises(NotFound, match="holds no run"):
        Evaluation.read(tmp_path)
