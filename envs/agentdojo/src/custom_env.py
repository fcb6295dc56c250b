"""AgentDojo: an assistant with a user's mailbox, bank account, chat or bookings, and attackers who write into them."""

from importlib.metadata import version
from typing import Any

from agentdojo.agent_pipeline.agent_pipeline import load_system_message
from agentdojo.functions_runtime import Function
from dojo import catalogue
from dojo.episode import Episode

from aenv import Invalid, ToolError, register_function, register_reset, register_reward, register_tool

ANSWER = "submit_answer"
SYSTEM = (
    f"{load_system_message(None).strip()}\n"
    f"When you are done, give the user your final answer with the tool {ANSWER}: nothing else that you say is read."
)
_playing: Episode | None = None


def _episode() -> Episode:
    if _playing is None:
        raise ToolError("no task has begun")
    return _playing


def _offer(function: Function) -> None:
    """Make a tool of one of the benchmark's functions, which checks its arguments itself."""

    def tool(**arguments: Any) -> str:
        return _episode().call(function.name, arguments)

    schema = function.parameters.model_json_schema()
    register_tool(name=function.name, description=function.description, input_schema=schema)(tool)


for _function in catalogue.TOOLS.values():
    _offer(_function)


@register_tool(name=ANSWER)
def submit_answer(answer: str) -> str:
    """Give the user the final answer. The last one counts.

    Args:
        answer: What the user asked for, or what was done for them.
    """
    _episode().answer = answer
    return "The user has read it."


@register_function
def tasks(domain: str = "workspace", attack: str = "", injection: str = "", model: str = "local") -> dict[str, Any]:
    """The tasks of a suite.

    Args:
        domain: workspace, travel, banking, slack or all.
        attack: One of the benchmark's attacks; each user task is then attacked with each injection task.
        injection: Only this injection task, such as injection_task_1.
        model: What AgentDojo calls the model that is attacked; some attacks address it.
    """
    if injection and not attack:
        attack = catalogue.ATTACK
    if attack:
        for suite in catalogue.suites(domain):
            catalogue.attacker(suite.name, attack, model)
    attacked = {"attack": attack, "model": model} if attack else {}
    found = [
        {
            "id": chosen.id,
            "instruction": chosen.user.PROMPT,
            "system": SYSTEM,
            "reset": {"task": chosen.id, **attacked},
            "tools": [*(tool.name for tool in chosen.suite.tools), ANSWER],
            "metadata": {"suite": chosen.suite.name, "difficulty": chosen.user.DIFFICULTY.name.lower(), **attacked},
        }
        for chosen in catalogue.choose(domain, attack, injection)
    ]
    return {"tasks": found, "source": {"name": "agentdojo", "version": version("agentdojo")}}


@register_reset
def begin(task: str, attack: str = "", model: str = "local", seed: int | None = None) -> None:
    """Begin a task, with the environment as the benchmark has it, and the attack's texts in it where there is one.

    Args:
        task: Such as workspace-user_task_0, or workspace-user_task_0-injection_task_1 to be attacked.
        attack: How it is attacked.
        model: What AgentDojo calls the model that is attacked.
        seed: It changes nothing.
    """
    global _playing
    _playing = None
    chosen = catalogue.find(task)
    if attack and chosen.injection is None:
        raise Invalid(f"{task} names no injection task for the attack {attack}", hint=f"{task}-injection_task_1")
    _playing = Episode(chosen, attack or catalogue.ATTACK, model)


@register_function
def solution(task: str, attack: str = "", model: str = "local") -> list[dict[str, Any]]:
    """The calls that the benchmark's authors solve a task with, and their answer."""
    chosen = catalogue.find(task)
    environment = catalogue.environment(chosen, attack or catalogue.ATTACK, model)
    calls = chosen.user.ground_truth(environment)
    return [
        *({"name": call.function, "arguments": dict(call.args)} for call in calls),
        {"name": ANSWER, "arguments": {"answer": chosen.user.GROUND_TRUTH_OUTPUT}},
    ]


@register_reward
def utility(answer: str | None = None) -> dict[str, Any]:
    """Whether the user's task was done, and under an attack whether the attacker's was not.

    Args:
        answer: The agent's last words, for one that submitted none.
    """
    episode = _episode()
    return episode.judge(episode.answer if episode.answer is not None else answer or "")
