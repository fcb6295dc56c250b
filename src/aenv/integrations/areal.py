"""Episodes in instances as workflows of AReaL: ``trainer.train(workflow=AenvWorkflow("NAME", gconfig, tokenizer))``."""

from __future__ import annotations

import json
import logging
import os
import secrets
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import torch
from areal.api import InferenceEngine, ModelRequest, ModelResponse, RolloutWorkflow
from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal.infra import WorkflowExecutor, workflow_context
from areal.utils import stats_tracker

from aenv.client.environment import Environment
from aenv.integrations.checking import ENV, LOSE, TASK, WRITE, CheckFailed, tokenizer
from aenv.rl import Episode, Generated, OpenAIAgent, Rules, Task, TokenAgent, Trajectory, export, rollout
from aenv.rl.driven import RULES
from aenv.rl.playing import Agent

log = logging.getLogger(__name__)
PATIENCE = 3600.0
"""Seconds that an answer may take: AReaL holds requests back while it updates the weights."""


class AenvWorkflow(RolloutWorkflow):
    """Plays an episode with the model of an engine, token by token, and gives the row to train on.

    An episode that the platform lost is begun again as the rules say. If that does not help it is AReaL's rejected
    episode, which is in no batch.
    """

    def __init__(
        self,
        env: str | Environment,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        *,
        rules: Rules | None = None,
        **options: Any,
    ) -> None:
        """``tokenizer`` is one, or the path of one. ``options`` are those of ``TokenAgent``, such as ``system``."""
        if isinstance(tokenizer, str):
            from areal.utils.hf_utils import load_hf_tokenizer

            tokenizer = load_hf_tokenizer(tokenizer)
        self._env, self._rules = env, rules
        self._tokenizer = tokenizer
        self._gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer).new(n_samples=1)
        self._options = {"max_tokens": gconfig.max_tokens, **options}

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> dict[str, Any] | None:
        """One episode. ``data`` has the fields of a task; without a seed, all of a group get the same."""
        heard: list[ModelResponse] = []

        async def generate(ids: list[int]) -> Generated:
            request = ModelRequest(
                rid=uuid.uuid4().hex, input_ids=ids, gconfig=self._gconfig, tokenizer=self._tokenizer
            )
            found = await engine.agenerate(request)
            heard.append(found)
            reason = "length" if found.stop_reason == "length" else "stop"
            return Generated(found.output_tokens, found.output_logprobs, reason)

        agent = TokenAgent(generate, self._tokenizer, **self._options)

        async def play(env: Episode, task: Task) -> str:
            heard.clear()  # of an attempt that failed
            return await agent(env, task)

        trajectory = await _played(self._env, play, data, self._rules or Rules())
        if not trajectory.ok:
            log.warning("an episode is rejected: %s", trajectory.failure)
            return None
        return _row(trajectory, heard)


class AenvAgent:
    """Plays an episode with a model behind AReaL's proxy, which keeps what was read and written.

    So an episode under way is not begun again. It goes on in another instance, or its failure is raised, and AReaL
    rejects it.
    """

    def __init__(
        self,
        env: str | Environment,
        *,
        rules: Rules | None = None,
        system: str = "",
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        """``parameters`` are sent with each request, such as ``temperature``."""
        self._env, self._rules = env, rules
        self._system, self._parameters = system, dict(parameters or {})

    async def run(self, data: dict[str, Any], **extra: Any) -> float:
        """One episode, and its reward. In AReaL's mode ``subproc`` address and key are in the environment."""
        # Asked once: the proxy trains on each answer that it gave, also on one that nobody waited for.
        agent = OpenAIAgent(
            "default",
            base_url=extra.get("base_url") or os.environ["OPENAI_BASE_URL"],
            api_key=extra.get("api_key") or os.environ["OPENAI_API_KEY"],
            system=self._system,
            parameters=self._parameters,
            timeout=PATIENCE,
            retries=0,
        )
        trajectory = await _played(self._env, agent, data, replace(self._rules or RULES, once=True))
        return trajectory.reward


def check() -> str:
    """Play an episode with AReaL's executor, and an engine that says what does the task."""
    made = tokenizer()
    executor = WorkflowExecutor(
        InferenceEngineConfig(backend="sglang:d1", check_trajectory_format=True), _Scripted(made)
    )
    executor.initialize()
    try:
        workflow = AenvWorkflow(ENV, GenerationHyperparameters(), made)
        rows = executor.rollout_batch([msgspec.to_builtins(TASK)], workflow)
    finally:
        executor.destroy()
    if [row["rewards"].item() for row in rows] != [1.0]:
        raise CheckFailed("an episode that lost its instance, and then did its task, was not scored 1")
    if "kill" in made.decode(rows[0]["input_ids"][0]):
        raise CheckFailed("an instance was ended, and the episode went on in it")
    return "an episode lost its instance, was begun again in another, and was scored 1"


class _Scripted(InferenceEngine):
    """Does the task, ends the instance, and does the task once more."""

    initialized = True

    def __init__(self, tokenizer: Any) -> None:
        calls = [f"<tool_call>{json.dumps(call)}</tool_call>" for call in (WRITE, LOSE, WRITE)]
        self._says = (tokenizer.encode(text) for text in (*calls, "Done."))

    def get_version(self) -> int:
        return 0

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        ids = next(self._says)
        return ModelResponse(req.input_ids, ids, [0.0] * len(ids), [0] * len(ids))


async def _played(env: str | Environment, agent: Agent, data: Mapping[str, Any], rules: Rules) -> Trajectory:
    known = {name: data[name] for name in Task.__struct_fields__ if data.get(name) is not None}
    sample = secrets.randbits(31)  # all of a group begin alike, and none of them goes on as another does
    return await rollout(env, agent, known, workflow_context.get().task_id, rules=rules, sample=sample)


def _row(of: Trajectory, heard: list[ModelResponse]) -> dict[str, Any] | None:
    """What AReaL trains on; nothing, where the model said nothing."""
    rows = list(export([of], "tokens"))
    if not rows:
        return None
    (row,) = rows
    mask = [0] * len(row["prompt_ids"]) + row["loss_mask"]
    versions = iter([version for answer in heard[: len(of.turns)] for version in answer.output_versions])
    stats_tracker.get(workflow_context.stat_scope()).scalar(reward=of.reward, num_turns=len(of.turns))
    found = {
        "input_ids": torch.tensor(row["prompt_ids"] + row["completion_ids"], dtype=torch.int32),
        "logprobs": torch.tensor([0.0] * len(row["prompt_ids"]) + row["logprobs"], dtype=torch.float32),
        "loss_mask": torch.tensor(mask, dtype=torch.int32),
        "versions": torch.tensor([next(versions) if one else -1 for one in mask], dtype=torch.int32),
        "rewards": torch.tensor(of.reward, dtype=torch.float32),
        "attention_mask": torch.ones(len(mask), dtype=torch.bool),
    }
    return {name: value.unsqueeze(0) for name, value in found.items()}
