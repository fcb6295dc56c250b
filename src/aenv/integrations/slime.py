"""Episodes of ours in slime's rollouts: its arguments ``--custom-generate-function-path``, ``--custom-rm-path`` and
``--dynamic-sampling-filter-path`` name ``generate``, ``reward`` and ``is_scored`` of this module.

slime is not on PyPI, and nothing of it is imported: its arguments and its samples are known here by their fields.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from transformers import AutoTokenizer

from aenv import http
from aenv.control import plain_header
from aenv.errors import EpisodeError, Forbidden, Invalid, ModelError, NotFound, Unauthorized, Unsupported
from aenv.rl.driven import RULES
from aenv.rl.exporting import export
from aenv.rl.generating import Generated, TokenAgent
from aenv.rl.models import MOST_ANSWER
from aenv.rl.playing import rollout
from aenv.rl.recording import Episode
from aenv.rl.rules import Rules
from aenv.rl.tasks import Task

RETRIES = 5
"""How often a server of slime's is asked again that is busy, or broke off."""
WRONG = frozenset(kind.code for kind in (Invalid, NotFound, Forbidden, Unauthorized, Unsupported))
"""Before an episode has begun, these are wrong with every other one, too."""


async def generate(args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool = False) -> Any:
    """Play an episode with the model that slime serves, and fill in the sample: its ids, and the reward.

    A failed one has no tokens and no reward, and is ``FAILED`` with ``remove_sample``; ``is_scored`` drops its group.
    Where slime broke the request off it is ``ABORTED``, which slime plays again. An evaluation has no filter: there the
    reward of a failed one is not a number. What would be wrong with every episode is raised.
    """
    attempts: list[_Served] = []

    async def play(env: Episode, task: Task) -> str:
        attempts.append(_Served(args, sample, sampling_params))
        return await attempts[-1](env, task)

    rules = getattr(args, "aenv_rules", None)
    trajectory = await rollout(
        args.aenv_env,
        play,
        _task(sample),
        sample.group_index,
        rules=RULES if rules is None else Rules(**rules),
        group="" if sample.group_index is None else str(sample.group_index),
        sample=sample.index or 0,
    )
    failed = trajectory.failure
    if failed is not None and failed.kind in WRONG and failed.phase in ("create", "reset"):
        raise EpisodeError(str(failed), hint=failed.hint)
    states = type(sample.status)
    sample.tokens, sample.loss_mask, sample.rollout_log_probs = [], [], []
    sample.response, sample.response_length = "", 0
    sample.metadata = {**(sample.metadata or {}), "aenv_failure": str(failed) if failed else ""}
    for row in export([trajectory], "tokens"):
        served, written = attempts[-1], row["completion_ids"]
        sample.tokens = row["prompt_ids"] + written
        sample.response, sample.response_length = served.text(written), len(written)
        sample.loss_mask, sample.rollout_log_probs = row["loss_mask"], row["logprobs"]
        sample.reward, sample.remove_sample = row["reward"], False
        sample.weight_versions = served.weights
        last = trajectory.turns[-1].generation
        is_cut = (last is not None and last.finish_reason == "length") or trajectory.messages[-1]["role"] != "assistant"
        sample.status = states.TRUNCATED if is_cut else states.COMPLETED
        return sample
    sample.status = states.ABORTED if attempts and attempts[-1].is_aborted else states.FAILED
    sample.reward, sample.remove_sample = math.nan if evaluation else None, True
    return sample


async def reward(args: Any, sample: Any, **_: Any) -> Any:
    """The reward that the episode was given, or a list of them for a list of samples; None for one that failed."""
    return [one.reward for one in sample] if isinstance(sample, list) else sample.reward


def is_scored(args: Any, samples: Sequence[Any], **_: Any) -> bool:
    """Whether a group has a reward for each of its samples. slime has no other way to keep what failed out of the mean
    that the others are compared with."""
    return all(isinstance(sample.reward, (int, float)) and math.isfinite(sample.reward) for sample in samples)


class _Served(TokenAgent):
    """The model that slime serves, in one attempt at an episode."""

    def __init__(self, args: Any, sample: Any, sampling_params: Mapping[str, Any]) -> None:
        tokenizer = _tokenizer(args.hf_checkpoint)
        template = getattr(args, "apply_chat_template_kwargs", None)
        super().__init__(self._ask, tokenizer, template=template, name="slime")
        self.text = functools.partial(tokenizer.decode, skip_special_tokens=False)
        self.weights: list[str] = []
        """The versions of the model that answered."""
        self.is_aborted = False
        self._url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
        self._headers = b"Content-Type: application/json\r\n"
        if getattr(args, "router_policy", None) == "consistent_hashing" and sample.session_id:
            self._headers += f"X-SMG-Routing-Key: {plain_header(sample.session_id, 'the session')}\r\n".encode()
        self._parameters = dict(sampling_params)

    async def _ask(self, ids: list[int]) -> Generated:
        if self.max_tokens is None:
            self.max_tokens = len(ids) + self._parameters["max_new_tokens"]
        parameters = {**self._parameters, "max_new_tokens": self.max_tokens - len(ids)}
        body = msgspec.json.encode({"input_ids": ids, "sampling_params": parameters, "return_logprob": True})
        response = await http.request(
            *("POST", self._url, "/generate"),
            headers=self._headers,
            body=body,
            retries=RETRIES,
            repeatable=True,
            most=MOST_ANSWER,
        )
        if response.status != 200:
            said = response.body[:300].decode(errors="replace")
            raise ModelError(f"the model's server answered with status {response.status}: {said}")
        told = msgspec.json.decode(response.body, type=_Answer).meta_info
        if told.weight_version is not None:
            self.weights.append(str(told.weight_version))
        if told.finish_reason.type == "abort":
            self.is_aborted = True
            raise ModelError("slime broke the request off")
        ids = [id for _, id, *_ in told.output_token_logprobs]
        logprobs = [logprob for logprob, *_ in told.output_token_logprobs]
        return Generated(ids, logprobs, told.finish_reason.type)


class _Finish(Struct):
    type: str


class _Meta(Struct):
    finish_reason: _Finish
    output_token_logprobs: list[tuple[float, int, Any]] = []
    weight_version: Any = None


class _Answer(Struct):
    """What SGLang answers, as far as it is read."""

    meta_info: _Meta


def _task(sample: Any) -> Task:
    """The task that the row's metadata has, or else what its prompt says."""
    if given := (sample.metadata or {}).get("task"):
        return Task.of(given)
    if isinstance(sample.prompt, str):
        return Task.of(sample.prompt)
    said = {message["role"]: message["content"] for message in sample.prompt}
    return Task.of({"instruction": said.get("user", ""), "system": said.get("system", "")})


@functools.cache
def _tokenizer(checkpoint: str) -> Any:
    return AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=True)  # as slime loads it
