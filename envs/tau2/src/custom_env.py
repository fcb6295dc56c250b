"""Customer service as the benchmark tau2 has it: a policy, tools on a database, and a user to talk to."""

import asyncio
import functools
import inspect
from threading import Lock
from typing import Any

from tau2_env import carrier
from tau2_env.carrier import DOMAINS, Domain, State
from tau2_env.chat import Chat
from tau2_env.evaluation import evaluate
from tau2_env.users import MOST_TURNS, ModelUser, Said, ScriptedUser, User

from aenv import (
    Context,
    Invalid,
    ModelError,
    ToolError,
    register_function,
    register_reset,
    register_reward,
    register_tool,
)

INSTRUCTION = (
    "A customer contacts you. What they say first is in the observation. Help them as your policy says: talk to them "
    "with send_message, look things up and change them with the other tools, and go on until send_message says that "
    "the conversation is done."
)
SYSTEM = """<instructions>
You are a customer service agent that helps the user according to the policy below.
In each turn you either send the user a message, with the tool send_message, or call another tool, and never both.
Be helpful, and always follow the policy.
</instructions>
{policy}"""


class Episode:
    """One task from its beginning to its score."""

    def __init__(self, id: str, state: State, user: User, judge: Chat | None) -> None:
        self.id = id
        self.state = state
        self.user = user
        self.judge = judge
        self.opening = Said("")
        self.ending = ""
        self.turns = 0
        self.turn = Lock()
        """Held while the user is about to say something."""
        self.lost: ModelError | None = None
        """Why the user has not answered: without an answer, nobody knows how the conversation would have ended."""
        self.unheard: str | None = None
        """What the agent said last, when it left before the user had answered."""


class _Current:
    """The episode that this sandbox is in."""

    episode: Episode | None = None


current = _Current()


def _episode() -> Episode:
    if current.episode is None:
        raise Invalid("no task has begun", hint='begin one with Environment.reset(seed, {"domain": ..., "task": ...})')
    return current.episode


def _check_goes_on(episode: Episode) -> None:
    """Raises for an agent that goes on after the user has left."""
    if episode.ending:
        raise ToolError(f"the conversation is over: {episode.ending}")


# The benchmark's tools


def _offer(name: str, domains: list[Domain]) -> None:
    """Register a tool. One name can be a tool of several domains, which differ in what they say about it."""
    tools = [domain.tools[name] for domain in domains]
    signatures = {str(inspect.signature(tool.call)) for tool in tools}
    if len(signatures) > 1:
        raise TypeError(f"the tool {name} takes different arguments in different domains: {signatures}")
    told = list(dict.fromkeys(tool.description for tool in tools))
    if len(told) > 1:
        told = [f"In {domain.name}: {domain.tools[name].description}" for domain in domains]

    @functools.wraps(tools[0].call)
    async def call(**arguments: Any) -> str:
        episode = _episode()
        _check_goes_on(episode)
        return await episode.state.call("assistant", name, arguments)

    register_tool(name=name, description="\n".join(told), input_schema=tools[0].schema)(call)


for _name in dict.fromkeys(name for domain in DOMAINS.values() for name in domain.tools):
    _offer(_name, [domain for domain in DOMAINS.values() if _name in domain.tools])


# The conversation


async def _ask(episode: Episode, message: str | None) -> Said:
    """Let the user speak, and keep what was said: nothing of it, when the user could not."""
    if not episode.turn.acquire(blocking=False):
        raise ToolError("the user is about to answer: send one message at a time")
    episode.unheard = message
    try:
        said = await episode.user.answer(message)
        episode.lost = episode.unheard = None
        if message is not None:
            episode.state.say("assistant", message)
            episode.turns += 1
        episode.state.say("user", said.text)
        episode.ending = said.ending or ("too many turns" if episode.turns >= MOST_TURNS else "")
    except ModelError as exc:
        episode.lost, episode.unheard = exc, None
        raise
    finally:
        episode.turn.release()
    return said


@register_tool
@register_function
async def send_message(message: str) -> dict[str, Any]:
    """Say something to the user, and get what the user answers. When done is true, the conversation is over.

    Args:
        message: What to say.
    """
    episode = _episode()
    _check_goes_on(episode)
    said = await _ask(episode, message)
    return {"message": said.text, "done": bool(episode.ending)}


@register_function
async def act_as_user(tool: str, arguments: dict[str, Any] | None = None) -> str:
    """Call a tool of the user's, in the user's place.

    Args:
        tool: Its name.
        arguments: What it takes.
    """
    return await _episode().state.call("user", tool, arguments or {})


@register_function
def done() -> dict[str, Any]:
    """Whether the conversation is over, and why."""
    episode = _episode()
    return {"done": bool(episode.ending), "reason": episode.ending, "turns": episode.turns}


@register_function
def get_system_prompt() -> str:
    """The system prompt of the task that has begun: what is asked of the agent, and the policy."""
    return SYSTEM.format(policy=_episode().state.domain.policy)


@register_function
def get_task_info() -> dict[str, Any]:
    """The task that has begun: its domain, its id here and in the benchmark, its tools and what the user said first."""
    episode = _episode()
    return {
        "task": episode.id,
        "benchmark_id": episode.state.task.id,
        "domain": episode.state.domain.name,
        "tools": _tools(episode.state.domain),
        "user": type(episode.user).__name__,
        "message": episode.opening.text,
    }


# Tasks


def _tools(domain: Domain) -> list[str]:
    return [*domain.tools, "send_message"]


@register_function
def tasks(domain: str = "airline", split: str = "base", ctx: Context | None = None) -> dict[str, Any]:
    """The tasks of a domain.

    Args:
        domain: airline, retail or telecom.
        split: base is what the benchmark reports; train and test are parts of it, and telecom also has small and full.
    """
    found = carrier.domain(domain, ctx.datasource if ctx else "")
    same = {
        "instruction": INSTRUCTION,
        "system": SYSTEM.format(policy=found.policy),
        "tools": _tools(found),
        "metadata": {"domain": domain, "split": split},
    }
    listed = [{"id": id, "reset": {"domain": domain, "task": id}, **same} for id in found.ids(split)]
    return {"tasks": listed, "source": found.source}


@register_reset
async def begin(
    task: str, domain: str = "airline", seed: int | None = None, ctx: Context | None = None
) -> dict[str, Any]:
    """Begin a task: its databases as they were, and a user who says the first words.

    Args:
        task: Its id.
        domain: airline, retail or telecom.
        seed: Decides ids that are drawn, and is given to models.
    """
    current.episode = None
    where = carrier.domain(domain, ctx.datasource if ctx else "")
    variables = dict(ctx.environment_variables) if ctx else {}
    state = State(where, where.task(task))
    chat = Chat.of("USER", variables, seed)
    user = ModelUser(state, chat) if chat else ScriptedUser(state)
    episode = Episode(carrier.public_id(task), state, user, Chat.of("JUDGE", variables, seed))
    episode.opening = await _ask(episode, None)
    current.episode = episode
    return {"message": episode.opening.text}


@register_function
def solution(task: str = "", domain: str = "", ctx: Context | None = None) -> list[dict[str, Any]]:
    """What the benchmark's gold does: calls of the agent, calls of the user, and what the user must have been told.

    Args:
        task: Its id; without one, the task that has begun.
        domain: Its domain; without one, that of the task that has begun.
    """
    if task and domain:
        wanted = carrier.domain(domain, ctx.datasource if ctx else "").task(task)
    elif task and carrier.public_id(task) != _episode().id:
        raise Invalid(f"{task[:100]!r} is not the task that has begun", hint="say which domain it is of")
    else:
        wanted = _episode().state.task
    criteria = wanted.evaluation_criteria
    steps: list[dict[str, Any]] = []
    for action in (criteria and criteria.actions) or []:
        if action.requestor == "user":
            given = {"tool": action.name, "arguments": action.arguments}
            steps.append({"function": "act_as_user", "arguments": given})
        else:
            steps.append({"name": action.name, "arguments": action.arguments})
    if criteria and criteria.communicate_info:
        steps.append({"name": "send_message", "arguments": {"message": "; ".join(criteria.communicate_info)}})
    return steps


@register_reward
def score() -> dict[str, Any]:
    """The benchmark's own evaluation of the task that has begun: 1 when everything passed that the task counts.

    Beside the score there is each part that was judged (database, actions, communicate, environment, nl_assertions),
    basis, the parts that count for this task, and not_judged, those that nobody could judge and that are left out.
    """
    episode = _episode()
    with episode.turn:  # what the user is about to say counts, too
        pass
    return asyncio.run(_scored(episode))


async def _scored(episode: Episode) -> dict[str, Any]:
    if episode.unheard is not None:  # to leave early is no way out of a score, and the user's slowness is no zero
        await _ask(episode, episode.unheard)
    if episode.lost is not None:
        raise episode.lost
    return await evaluate(episode.state, episode.judge)
