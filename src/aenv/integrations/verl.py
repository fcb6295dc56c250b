"""Episodes of ours in verl's rollouts: a loop that is exact in its tokens, and verl's own with our tools in it.

verl gives a row whose loop returned a reward, whatever became of it, and leaves out a session whose loop raised, while
its siblings are kept. So an episode that failed, after all that its rules try again, is raised out of the loop.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from verl.experimental.agent_loop.tool_agent_loop import SPEC_DECODE_EXTRA_KEYS, ToolAgentLoop
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.workers.rollout.replica import TokenOutput

from aenv.client.environment import Environment
from aenv.client.sync import wait
from aenv.errors import AEnvError, Conflict, EpisodeError, Invalid, ModelError, NotFound, did_you_mean
from aenv.integrations.checking import ENV, LOOK, TASK, WRITE, judge, lose_episode
from aenv.rl.driven import RULES, Driven
from aenv.rl.exporting import export
from aenv.rl.generating import Generated, TokenAgent
from aenv.rl.playing import derived, rollout
from aenv.rl.recording import HARMLESS, Episode
from aenv.rl.rules import Rules
from aenv.rl.tasks import Task
from aenv.rl.viewing import result_text


class _Episodes:
    """What both loops are told: rules by the loop's configuration, the task by the row, the environment by either."""

    def __init__(self, *args: Any, env: str = "", rules: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """``env`` is for rows that name none. ``rules`` are the fields of ``aenv.rl.Rules``; without them an episode
        goes on in another instance when its own is lost, if that can be."""
        super().__init__(*args, **kwargs)
        self._env = env
        self._rules = RULES if rules is None else Rules(**_plain(rules))

    def _drawn(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The episode that a row is about. Those of a group begin in the same way."""
        group = str(row.get("uid", ""))
        return {
            "env": row.get("env") or self._env,
            "task": _task(row),
            "seed": derived(group) if group else None,
            "rules": self._rules,
            "group": group,
            "sample": int(row.get("session_id", 0)),
        }


@register("aenv")
class AenvAgentLoop(_Episodes, AgentLoopBase):
    """An episode with the model that verl serves: it is trained on the ids that it wrote, and on no others."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Play it, again where the rules say so. Raises ``EpisodeError`` for an episode without a score."""
        attempts: list[_Served] = []

        async def play(env: Episode, task: Task) -> str:
            attempts.append(_Served(self, sampling_params))
            return await attempts[-1](env, task)

        trajectory = await rollout(agent=play, **self._drawn(row))
        reward, limit = trajectory.reward, self.rollout_config.response_length
        for tokens in export([trajectory], "tokens"):
            logprobs = tokens["logprobs"]
            return AgentLoopOutput(
                prompt_ids=tokens["prompt_ids"],
                response_ids=tokens["completion_ids"][:limit],
                response_mask=tokens["loss_mask"][:limit],
                response_logprobs=None if logprobs is None else logprobs[:limit],
                reward_score=reward,
                num_turns=2 * len(trajectory.turns),
                metrics=AgentLoopMetrics(
                    generate_sequences=trajectory.seconds["model"], tool_calls=trajectory.seconds["tool"]
                ),
                extra_fields={**attempts[-1].told(), "turn_scores": [], "tool_rewards": []},
            )
        raise EpisodeError(f"in episode {trajectory.id} the model wrote nothing")


class _Served(TokenAgent):
    """The model that verl serves, in one attempt at an episode."""

    def __init__(self, loop: AgentLoopBase, sampling_params: dict[str, Any]) -> None:
        super().__init__(self._ask, loop.tokenizer, template=_plain(loop.apply_chat_template_kwargs), name="verl")
        self._server = loop.server_manager
        self._limits = loop.rollout_config
        self._parameters = sampling_params
        self._request = uuid.uuid4().hex
        """The same for all turns, which verl sends to the same server."""
        self._outputs: list[TokenOutput] = []

    async def _ask(self, ids: list[int]) -> Generated:
        if self.max_tokens is None:
            if len(ids) > self._limits.prompt_length:
                hint = "make data.max_prompt_length longer, or the task shorter"
                raise Invalid(f"a prompt of {len(ids)} tokens, of at most {self._limits.prompt_length}", hint=hint)
            self.max_tokens = len(ids) + self._limits.response_length
        output = await self._server.generate(request_id=self._request, prompt_ids=ids, sampling_params=self._parameters)
        self._outputs.append(output)
        if output.stop_reason == "aborted":
            raise ModelError("verl broke the request off")
        is_cut = len(ids) + len(output.token_ids) >= self.max_tokens
        return Generated(output.token_ids, output.log_probs or None, "length" if is_cut else "stop")

    def told(self) -> dict[str, Any]:
        """What verl's servers tell beside the ids, such as the step of the weights, as its own loop sums it up."""
        found = dict(self._outputs[0].extra_fields)
        for output in self._outputs[1:]:
            for key, value in output.extra_fields.items():
                if key == "max_global_steps":
                    found[key] = value
                elif key in SPEC_DECODE_EXTRA_KEYS:
                    found[key] = found.get(key, 0) + value
        return found


@register("aenv_tools")
class AenvToolLoop(_Episodes, ToolAgentLoop):
    """verl's own loop of tools in an episode, which begins and is scored here, and every ``AenvTool`` plays in it."""

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Play it. Raises ``EpisodeError`` for an episode without a score."""
        episode = Driven(**self._drawn(row))
        ours = [name for name, tool in self.tools.items() if isinstance(tool, AenvTool)]
        told = {**(row.get("tools_kwargs") or {}), **{name: {"create_kwargs": {"episode": episode}} for name in ours}}
        try:
            await episode.begin()
            output = await super().run(sampling_params, **{**row, "tools_kwargs": told})
            output.reward_score = (await episode.end()).reward
            return output
        except _Broken as broken:
            raise broken.error from None
        finally:
            await episode.abandon()


class AenvTool(BaseTool):
    """A tool of an environment in verl's tool configuration, where ``config`` names both: ``env`` and ``tool``.

    verl makes and releases a tool with every call. What lasts is the episode, which ``AenvToolLoop`` gives to the tools
    of a trajectory: they all play in its one instance.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        """Without a schema, an instance is asked for it, once in a process for all tools of an environment."""
        super().__init__(config, tool_schema or _schema(config["env"], config["tool"]))
        self._episodes: dict[str, Driven] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Let a call begin."""
        episode = kwargs.get("create_kwargs", {}).get("episode")
        if episode is None:
            raise _Broken(Conflict(f"tool {self.name} has no episode", hint="let the agent loop be AenvToolLoop"))
        instance_id, response = await super().create(instance_id)
        self._episodes[instance_id] = episode
        return instance_id, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Call it. There is no reward of a call: that of the episode comes at its end."""
        try:
            text = result_text(await self._episodes[instance_id].call_tool(self.name, parameters))
        except AEnvError as exc:
            if not isinstance(exc, HARMLESS) and type(exc) is not EpisodeError:  # which it is when turns are used up
                raise _Broken(exc) from exc
            text = exc.message
        return ToolResponse(text=text), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """End the episode, and give its reward. Raises ``EpisodeError`` where there is none."""
        return (await self._episodes[instance_id].end()).reward

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """The call is over. The episode goes on."""
        self._episodes.pop(instance_id, None)


class _Broken(BaseException):
    """Ends verl's loop, which tells a model of every ``Exception`` of a tool and goes on."""

    def __init__(self, error: AEnvError) -> None:
        super().__init__(str(error))
        self.error = error


def check() -> str:
    """Play an episode with a tool of verl's, which loses its instance on the way."""
    return wait(_played(AenvTool({"type": "native", "env": ENV, "tool": LOOK["name"]})))


async def _played(tool: AenvTool) -> str:
    episode = Driven(ENV, TASK)

    async def call(what: Mapping[str, Any]) -> str:
        id, _ = await tool.create(create_kwargs={"episode": episode})
        await tool.execute(id, what["arguments"])
        return id

    await episode.begin()
    try:
        await call(WRITE)
        before = episode.episode.instance_id
        await lose_episode(episode)
        id = await call(LOOK)
        after = episode.episode.instance_id
        return judge(await tool.calc_reward(id), before, after)
    except _Broken as broken:
        raise broken.error from None
    finally:
        await episode.abandon()


def _schema(env: str, tool: str) -> OpenAIFunctionToolSchema:
    known = _tools(env)
    if tool not in known:
        raise NotFound(f"{env} has no tool {tool!r}", hint=did_you_mean(tool, known))
    return OpenAIFunctionToolSchema.model_validate(known[tool])


@functools.cache
def _tools(env: str) -> dict[str, Any]:
    """What a model is offered, by name."""

    async def ask() -> list[dict[str, Any]]:
        async with Environment(env) as instance:
            return await instance.list_openai_tools()

    return {tool["function"]["name"]: tool for tool in wait(ask())}


def _task(row: Mapping[str, Any]) -> Task:
    """The row's task, as JSON or a mapping; where it has none, what its prompt says."""
    given = row.get("task")
    if given is None:
        said = {message["role"]: message["content"] for message in row["raw_prompt"]}
        return Task.of({"instruction": said.get("user", ""), "system": said.get("system", "")})
    return Task.of(msgspec.json.decode(given) if isinstance(given, str) else given)


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without what Hydra makes of them."""
    found: dict[str, Any] = OmegaConf.to_container(OmegaConf.create(given), resolve=True)
    return found
