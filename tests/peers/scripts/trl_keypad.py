"""TRL on instances of ours: ``SEED SHARE`` trains the example, while so many episodes of a hundred lose their instance
on the way, and do not go on in another; ``api`` and ``rollouts EVERY`` look at what a trainer gets."""

import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import train_trl as example
from datasets import Dataset
from transformers.utils import get_json_schema
from trl import GRPOTrainer

from aenv import AEnvError, Environment, attach
from aenv.client.sync import wait
from aenv.integrations import trl as adapter
from aenv.integrations.checking import lose, lose_episode
from aenv.rl import Driven, Episode, Rules, TokenAgent

KEEPS = Rules()
"""An episode whose instance is lost has failed: the trainer is to be seen with failures."""


class Losing:
    """Loses the instance of that share of episodes, each before a call or before it is scored."""

    def __init__(self, share: float, seed: int) -> None:
        self.lost = 0
        call, end, draw = Driven.call_tool, Driven.end, random.Random(seed)

        async def lose(driven: Driven) -> None:
            goes_on = driven._episode is not None and driven._episode.broken is None and not driven._done.is_set()
            if goes_on and draw.random() < share / 2:
                self.lost += 1
                await lose_episode(driven)

        async def losing_call(driven: Driven, *args: Any, **more: Any) -> Any:
            await lose(driven)
            return await call(driven, *args, **more)

        async def losing_end(driven: Driven, *args: Any) -> Any:
            await lose(driven)
            return await end(driven, *args)

        Driven.call_tool, Driven.end = losing_call, losing_end  # type: ignore[method-assign]


class Looking(GRPOTrainer):
    """Looks at every row that is trained on, and at the episode that it is of."""

    rows = scored = masked = wrong = called = 0
    curve: ClassVar[list[float]] = []

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        found = super()._generate_and_score_completions(inputs)
        outcomes = [place.trajectory for place in self.environments]
        rewards = [one.reward if one.ok else math.nan for one in outcomes]
        self.curve.append(statistics.fmean(reward for reward in rewards if not math.isnan(reward)))
        kept = next(iter(self._logs["rewards"].values()))
        told = list(kept)[-len(rewards) :]
        for place, (one, reward) in enumerate(zip(outcomes, rewards, strict=True)):
            self.rows += 1
            self.scored += one.ok
            self.called += bool(one.calls)
            group = [other for other in rewards[place // 8 * 8 : place // 8 * 8 + 8] if not math.isnan(other)]
            advantage = 0.0 if not one.ok or not group else reward - sum(group) / len(group)
            trained = found["advantages"][place].item()
            self.masked += math.isnan(told[place]) and trained == 0.0
            same_side = (trained > 1e-6) == (advantage > 1e-6) and (trained < -1e-6) == (advantage < -1e-6)
            same_reward = math.isnan(told[place]) if not one.ok else told[place] == reward
            self.wrong += not (same_side and same_reward)
        return found


def train(seed: int, share: float) -> dict[str, Any]:
    losing = Losing(share, seed)
    rules = {"rules": KEEPS} if share else {}
    made = adapter.environment_factory
    example.environment_factory = lambda env: made(env, **rules)
    example.GRPOTrainer = Looking
    trainer = example.train(seed=seed)
    before, after = example.means(trainer)
    return {
        "before": before,
        "after": after,
        "curve": example.curve(trainer),
        "lost": losing.lost,
        **{name: getattr(trainer, name) for name in ("rows", "scored", "masked", "wrong", "called", "curve")},
    }


ODD = {
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    "some": {"type": "array", "items": {"type": "integer"}},
    "one": {"enum": ["x", "y"]},
    "either": {"type": ["integer", "string"], "description": "one\n  of two"},
    "any": {},
}
"""What arguments of a tool may be like."""


def refused(ask: Callable[[], Any]) -> str:
    try:
        return str(ask())
    except AEnvError as exc:
        return exc.code


def api() -> dict[str, Any]:
    keypad = adapter.environment_factory("keypad")
    place = keypad()
    schema = get_json_schema(place.press)["function"]
    odd = {"name": "fs-read", "parameters": {"type": "object", "properties": ODD, "required": ["some"]}}
    read = get_json_schema(adapter._method(odd))["function"]
    told = place.reset(prompt=[], reset={"digit": 3, "of_another_row": None}, seed=None)
    alone = keypad().reset(instruction="Press.", reset={"digit": 2})
    said = place.press(key=3)
    asked = (lambda: place.press(key=9), lambda: place.press(kye=3), lambda: keypad().reset(reset={"key": 1}))
    raised = [refused(ask) for ask in asked]
    reward = place.get_reward()
    wrong = keypad()
    wrong.reset(reward={"key": 3})
    raised.append(refused(wrong.get_reward))
    failing = adapter.environment_factory("keypad", rules=KEEPS)()
    failing.reset(reset={"digit": 3})
    failing.press(key=3)
    wait(lose_episode(failing._driven))
    return {
        "schemas": [schema, read],
        "told": [told, alone],
        "said": said,
        "raised": raised,
        "rewards": [reward, place.get_reward(), failing.get_reward()],
    }


def rollouts(every: int) -> dict[str, Any]:
    """A step by ``rollout_func``, in which an instance is lost each so many times that a model is asked."""
    written: set[tuple[int, ...]] = set()
    rows: list[dict[str, Any]] = []
    heard, numbers = TokenAgent._heard, itertools.count(1)

    async def losing(agent: TokenAgent, episode: Episode, ids: list[int]) -> Any:
        if next(numbers) % every == 0:
            sandbox = episode.sandbox
            async with Environment("keypad", provision=attach(sandbox.url, sandbox.token)) as another:
                await lose(another)
        return await heard(agent, episode, ids)

    class Batch(GRPOTrainer):
        def _generate_single_turn(self, *args: Any) -> Any:
            ids, logprobs = super()._generate_single_turn(*args)
            written.update(map(tuple, ids))
            return ids, logprobs

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            found = super()._generate_and_score_completions(inputs)
            trained = (found["tool_mask"] * found["completion_mask"]).bool()
            for place, one in enumerate(inputs):
                ids, mask = found["completion_ids"][place], trained[place].tolist()
                runs = [
                    [ids[at].item() for at, _ in run]
                    for on, run in itertools.groupby(enumerate(mask), lambda x: x[1])
                    if on
                ]
                rows.append({"reward": one["reward"], "written": [tuple(run) in written for run in runs]})
            return found

    example.set_seed(1)
    tools = [{"type": "function", "function": tool} for tool in wait(adapter._offered("keypad"))]
    model, tokenizer = example.warmed(tools, 1)
    play = adapter.rollout_func("keypad", lambda prompt: {"instruction": prompt[0]["content"]}, rules=Rules(retries=0))
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": example.PROMPT}]}] * 16)
    args = example.config(1, 1)
    TokenAgent._heard = losing  # type: ignore[method-assign]
    trainer = Batch(model, adapter.score, args, train_dataset=data, processing_class=tokenizer, rollout_func=play)
    try:
        trainer.train()
    except AEnvError as exc:
        return {"raised": exc.code, "message": exc.message}
    failed = [row for row in rows if row["reward"] is None]
    scored = [row for row in rows if row["reward"] is not None]
    return {
        "rows": len(rows),
        "failed": len(failed),
        "of_failed": sum(len(row["written"]) for row in failed),
        "of_scored": max(len(row["written"]) for row in scored),
        "exact": all(all(row["written"]) for row in scored),
        "finite": all(bool(value.isfinite().all()) for value in model.parameters()),
    }


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["api"]:
            told = api()
        case ["rollouts", every]:
            told = rollouts(int(every))
        case [seed, share]:
            told = train(int(seed), float(share))
    print(json.dumps(told))
