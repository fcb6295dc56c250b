"""Instances in TRL's GRPO, in either of its two ways: ``GRPOTrainer(environment_factory=environment_factory("NAME"))``,
where the trainer calls the tools, and ``GRPOTrainer(rollout_func=rollout_func("NAME"))``, where we do."""

from __future__ import annotations

import asyncio
import inspect
import logging
import queue
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import NoneType
from typing import Any, Literal, Union

from aenv.client.environment import Environment
from aenv.client.sync import start, wait
from aenv.errors import AEnvError, EpisodeError, Forbidden, Invalid, NotFound, Unauthorized, Unsupported
from aenv.integrations.checking import ENV, LOOK, TASK, WRITE, CheckFailed, judge, lose_episode
from aenv.rl.driven import RULES, Driven
from aenv.rl.exporting import export
from aenv.rl.generating import Generated, TokenAgent
from aenv.rl.models import opening, seen
from aenv.rl.playing import rollout
from aenv.rl.rules import Rules
from aenv.rl.tasks import Task
from aenv.rl.trajectory import Trajectory

log = logging.getLogger("aenv.integrations")
OURS = ("reset", "get_reward")
"""What no tool can be called: the trainer asks these itself."""
WRONG = (Invalid, NotFound, Forbidden, Unauthorized, Unsupported)
"""What would be wrong with every episode ends the training; what else fails masks one."""
Given = Task | str | Mapping[str, Any] | None
_TYPES = {"string": str, "integer": int, "number": float, "boolean": bool, "object": dict, "null": NoneType}


# The trainer calls the tools


def environment_factory(
    env: str | Environment, task: Callable[[dict[str, Any]], Given] | None = None, *, rules: Rules | None = None
) -> type[Played]:
    """What ``GRPOTrainer`` takes as its ``environment_factory``: a class, whose methods are the tools of ``env``.

    An instance is started for a moment, to learn which these are. ``task`` makes the task of a row of the dataset; by
    default it is of the columns that are called like fields of a task. ``rules`` are those of ``Driven``.
    """
    methods = {str(tool["name"]): _method(tool) for tool in wait(_offered(env))}
    if taken := [name for name in methods if name in OURS or name.startswith("_")]:
        raise Unsupported(f"TRL asks a method {taken[0]!r} of each environment, and never offers it to a model")
    name = env if isinstance(env, str) else env.env_name
    return type(name, (Played,), {**methods, "_env": env, "_task": staticmethod(task or _fields), "_rules": rules})


class Played:
    """One place of a batch: an episode after the other, each in an instance of its own."""

    _env: str | Environment
    _task: Callable[[dict[str, Any]], Given]
    _rules: Rules | None
    _driven: Driven | None = None

    @property
    def trajectory(self) -> Trajectory | None:
        """Of the episode, once it was scored or has failed."""
        return None if self._driven is None else self._driven.trajectory

    def reset(self, **row: Any) -> str | None:
        """Begin the episode of a row; what the model is told beside its prompt."""
        if self._driven is not None:
            wait(self._driven.abandon())  # nothing happens where it was scored
        driven = self._driven = Driven(self._env, self._task(row), row.get("seed"), rules=self._rules)
        try:
            observation = wait(driven.begin())
        except WRONG:
            raise
        except AEnvError as exc:
            log.warning("an episode did not begin, and is masked: %s", exc)
            return None
        if "prompt" not in row:
            return opening(driven.task, observation)
        told = opening(Task(), observation)
        return f"\n\n{told}" if told else None

    def get_reward(self) -> float | None:
        """The score, once the model is done; None, which TRL masks, where the platform failed."""
        if self._driven is None:
            raise EpisodeError("no episode has begun")
        trajectory = wait(self._driven.end())
        failed = trajectory.failure
        if failed is None or failed.kind in [wrong.code for wrong in WRONG]:
            return trajectory.reward  # or what it raises
        log.warning("an episode is masked: %s", failed)
        return None


def _fields(row: dict[str, Any]) -> Given:
    """Columns called like fields of a task, without what a dataset fills in where only other rows have a key."""
    found = {name: row[name] for name in Task.__struct_fields__ if row.get(name) is not None}
    for name, value in found.items():
        if isinstance(value, dict):
            found[name] = {key: part for key, part in value.items() if part is not None}
    return found


async def _offered(env: str | Environment) -> list[dict[str, Any]]:
    driven = Driven(env, rules=Rules(reset=False))
    try:
        await driven.begin()
        return [tool["function"] for tool in await driven.list_openai_tools()]
    finally:
        await driven.abandon()


def _method(tool: dict[str, Any]) -> Callable[..., str]:
    """A method that Hugging Face's ``get_json_schema`` reads as the tool."""
    name, schema = str(tool["name"]), tool.get("parameters") or {}
    properties, required = schema.get("properties") or {}, schema.get("required") or []

    def method(self: Played, /, **arguments: Any) -> str:
        if self._driven is None:
            raise EpisodeError("no episode has begun")
        result = wait(self._driven.call_tool(name, arguments))
        result.raise_for_error()  # the model is told, and TRL counts it
        return seen(result)

    hints = {key: _hint(about) for key, about in properties.items()}
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    told = []
    for key, about in properties.items():
        default = inspect.Parameter.empty if key in required else about.get("default")
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(key, kind, default=default, annotation=hints[key]))
        told.append(f"    {key}: {' '.join(str(about.get('description') or key).split())}")
    method.__annotations__ = hints
    method.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    method.__name__ = method.__qualname__ = name
    method.__doc__ = str(tool.get("description") or name) + ("\n\nArgs:\n" + "\n".join(told) if told else "")
    return method


def _hint(schema: dict[str, Any]) -> Any:
    """A schema as a type; of what is within an object, nothing."""
    if choices := schema.get("enum"):
        return Literal[tuple(choices)]
    kinds = schema.get("type")
    if variants := schema.get("anyOf") or schema.get("oneOf"):
        return Union[tuple(_hint(variant) for variant in variants)]  # noqa: UP007 - as many as there are
    if isinstance(kinds, list):
        return Union[tuple(_hint({**schema, "type": kind}) for kind in kinds)]  # noqa: UP007
    if kinds == "array":
        return list[_hint(schema.get("items") or {})]  # type: ignore[misc]
    return _TYPES.get(str(kinds), Any)


# We call the tools


def rollout_func(
    env: str | Environment,
    task: Callable[[list[dict[str, Any]]], Given] | None = None,
    *,
    rules: Rules | None = None,
    **agent: Any,
) -> Callable[[list[Any], Any], dict[str, Any]]:
    """What ``GRPOTrainer`` takes as its ``rollout_func``, with ``score`` as the reward function.

    All episodes of a batch are played at the same time, with the trainer's own generation. ``task`` makes the task of a
    prompt; by default it is what its messages say. What fails is played again as the rules say, and else no token of it
    is trained on. ``agent`` are options of ``TokenAgent``.
    """

    def play(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        tasks = [Task.of((task or _said)(prompt)) for prompt in prompts]
        return _rows(_played(env, tasks, rules or RULES, agent, trainer), trainer.processing_class.eos_token_id)

    return play


def score(reward: list[float | None], **_: Any) -> list[float | None]:
    """The reward function beside ``rollout_func``."""
    return reward


def _said(prompt: list[dict[str, Any]]) -> Given:
    by_role = {message["role"]: message["content"] for message in prompt}
    return {"instruction": by_role.get("user", ""), "system": by_role.get("system", "")}


def _played(
    env: str | Environment, tasks: list[Task], rules: Rules, options: dict[str, Any], trainer: Any
) -> list[Trajectory]:
    """An episode of each task. Models are asked by this thread, where the trainer has its own."""
    asked: queue.SimpleQueue[tuple[list[int], Future[Generated]] | None] = queue.SimpleQueue()

    async def generate(ids: list[int]) -> Generated:
        answer: Future[Generated] = Future()
        asked.put((ids, answer))
        return await asyncio.wrap_future(answer)

    async def play() -> list[Trajectory]:
        agent = TokenAgent(generate, trainer.processing_class, **options)
        return await asyncio.gather(*(rollout(env, agent, task, rules=rules) for task in tasks))

    playing = start(play())
    playing.add_done_callback(lambda _: asked.put(None))
    try:
        while (first := asked.get()) is not None:
            batch = [first]
            while not asked.empty() and (another := asked.get()) is not None:
                batch.append(another)
            _answer([(ids, answer) for ids, answer in batch if answer.set_running_or_notify_cancel()], trainer)
        return playing.result()
    finally:
        playing.cancel()  # where the model could not be asked


def _answer(batch: list[tuple[list[int], Future[Generated]]], trainer: Any) -> None:
    if not batch:
        return
    written, logprobs = trainer._generate_single_turn([ids for ids, _ in batch], None, {}, 1)
    for place, (_, answer) in enumerate(batch):
        ids = written[place]
        is_whole = ids[-1:] == [trainer.processing_class.eos_token_id]
        known = None if logprobs is None else logprobs[place]
        answer.set_result(Generated(ids, known, "stop" if is_whole else "length"))


def _rows(trajectories: list[Trajectory], eos: int) -> dict[str, Any]:
    """What the trainer takes. A failed episode has a token that is masked, and no reward."""
    found = [next(iter(export([trajectory], "tokens")), None) for trajectory in trajectories]
    failures = [trajectory.outcome for trajectory, row in zip(trajectories, found, strict=True) if row is None]
    for failure in failures:
        log.warning("an episode is masked: %s", failure)
    if len(failures) == len(found):  # a mean over nothing is no number, and nor would be the weights
        raise EpisodeError(f"no episode of {len(found)} was scored; the last: {failures[-1]}")
    nothing = {"prompt_ids": [eos], "completion_ids": [eos], "loss_mask": [0], "logprobs": [0.0], "reward": None}
    rows = [row or nothing for row in found]
    known = all(row["logprobs"] is not None for row in rows)
    return {
        "prompt_ids": [row["prompt_ids"] for row in rows],
        "completion_ids": [row["completion_ids"] for row in rows],
        "logprobs": [row["logprobs"] for row in rows] if known else None,
        "env_mask": [row["loss_mask"] for row in rows],
        "reward": [row["reward"] for row in rows],
    }


def check() -> str:
    """Play an episode as the trainer does, and lose its instance on the way."""
    from transformers.utils import get_json_schema
    from trl import GRPOTrainer, __version__

    takes = inspect.signature(GRPOTrainer).parameters
    if missing := [name for name in ("environment_factory", "rollout_func") if name not in takes]:
        raise CheckFailed(f"GRPOTrainer of TRL {__version__} takes no {missing[0]}", hint="install trl>=1.16")
    made = environment_factory(ENV, lambda row: TASK)
    place = made()
    place.reset()
    call = getattr(place, WRITE["name"])
    offered = get_json_schema(call)["function"]["parameters"]["required"]
    if offered != ["command"]:
        raise CheckFailed(f"a model is told that {WRITE['name']} requires {offered}, not its command")
    call(**WRITE["arguments"])
    driven = place._driven
    assert driven is not None
    before = driven.episode.instance_id
    wait(lose_episode(driven))
    call(**LOOK["arguments"])
    after = driven.episode.instance_id
    return judge(place.get_reward() or 0.0, before, after)
