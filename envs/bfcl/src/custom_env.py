"""BFCL v4, multi-turn: an agent serves a user over several turns with functions that keep a state."""

from importlib.metadata import version
from typing import Any

from bfcl_eval.constants.default_prompts import PROMPT_STYLE_TEMPLATES
from conversations import catalogue
from conversations.conversation import Conversation

from aenv import ToolError, register_function, register_reset, register_reward, register_tool

FINISH = "finish_turn"
ADDED = "call_added_function"
_STYLE = PROMPT_STYLE_TEMPLATES["classic"]
SYSTEM = (
    f"{_STYLE['persona']} {_STYLE['task']}\n\n{_STYLE['multiturn_behavior']}\n\n"
    f"To complete a turn, call {FINISH} with what you have to say to the user. It gives you what the user says next, "
    "or tells that the conversation is over."
)
_going: Conversation | None = None


def _conversation() -> Conversation:
    if _going is None:
        raise ToolError("no conversation has begun")
    return _going


def _offer(name: str) -> None:
    """Make a tool of one of the benchmark's functions. Which arguments are good is for the function to say."""

    def tool(**arguments: Any) -> str:
        return _conversation().call(name, arguments)

    schema = catalogue.schema(catalogue.FUNCTIONS[name]["parameters"])
    register_tool(name=name, description=catalogue.description(name), input_schema=schema)(tool)


for _name in catalogue.FUNCTIONS:
    _offer(_name)


@register_tool(name=ADDED)
def call_added_function(name: str, arguments: dict[str, Any]) -> str:
    """Call a function that the user added during the conversation.

    Args:
        name: The function.
        arguments: Its arguments, by name.
    """
    return _conversation().call(name, arguments)


@register_tool(name=FINISH)
def finish_turn(message: str = "") -> dict[str, Any]:
    """End your turn. The answer holds what the user says next, and functions that they added; or over is true.

    Args:
        message: What you have to say to the user: what was done, or what is missing.
    """
    return _conversation().next_turn()


@register_function
def tasks(domain: str = "all") -> dict[str, Any]:
    """The conversations of a category.

    Args:
        domain: base, miss_func, miss_param, long_context or all.
    """
    found = [
        {
            "id": entry.id,
            "instruction": entry.said(0),
            "system": SYSTEM,
            "reset": {"task": entry.id},
            "tools": [*entry.offered, *([ADDED] if entry.added else []), FINISH],
            "metadata": {"category": entry.category, "classes": entry.classes, "turns": len(entry.truth)},
        }
        for entry in catalogue.choose(domain)
    ]
    return {"tasks": found, "source": {"name": "bfcl-eval", "version": version("bfcl-eval")}}


@register_reset
def begin(task: str, seed: int | None = None) -> None:
    """Begin a conversation, with every API as the benchmark sets it up. The seed changes nothing."""
    global _going
    _going = None
    _going = Conversation(catalogue.find(task))


@register_function
def solution(task: str) -> list[dict[str, Any]]:
    """The calls that the benchmark's authors make, turn by turn."""
    entry = catalogue.find(task)
    held: set[str] = {name for names in entry.added.values() for name in names}
    found: list[dict[str, Any]] = []
    for turn in range(len(entry.truth)):
        for name, arguments in catalogue.calls(entry, turn):
            direct = {"name": name, "arguments": arguments}
            found.append({"name": ADDED, "arguments": direct} if name in held else direct)
        found.append({"name": FINISH, "arguments": {}})
    return found


@register_reward
def correct() -> dict[str, Any]:
    """1.0 when the benchmark's checker finds every turn's state and answers right."""
    return _conversation().judge()
