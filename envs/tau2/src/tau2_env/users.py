"""The simulated user: played by a model, or by a script that needs none.

Both know what the task's scenario says and nothing else of the task. Only they can call the user's tools.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple, Protocol

from inspect_evals.tau2.common.dataset import USER_MESSAGE

from aenv.errors import ModelError
from tau2_env import phone
from tau2_env.carrier import State, Tool
from tau2_env.chat import Chat

ENDINGS = {"###STOP###": "stop", "###TRANSFER###": "transfer", "###OUT-OF-SCOPE###": "out of scope"}
"""What the benchmark has a user say at the end, and why it ends."""
MOST_CALLS = 30
"""Tools that a model may call in one turn of the user's."""
MOST_TURNS = 100
"""Answers after which a user hangs up: the benchmark's own limit."""


class Said(NamedTuple):
    """What the user says."""

    text: str
    ending: str = ""
    """Why the conversation is over; empty while it goes on."""


class User(Protocol):
    """Somebody who wants something from the agent."""

    async def answer(self, message: str | None) -> Said:
        """What the user says to that; to nothing, at the beginning."""


class ModelUser:
    """A model in the user's place, with the benchmark's own guidelines, the scenario and the user's tools."""

    def __init__(self, state: State, chat: Chat) -> None:
        self._state = state
        self._chat = chat
        system = f"{state.domain.guidelines}\n<scenario>\n{state.task.user_scenario}\n</scenario>\n"
        self._messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
        self._tools = [_offered(tool) for tool in state.domain.user_tools.values()]

    async def answer(self, message: str | None) -> Said:
        async with self._chat.in_time():
            return await self._answer(message)

    async def _answer(self, message: str | None) -> Said:
        heard = {"role": "user", "content": USER_MESSAGE.text if message is None else message}
        messages = [*self._messages, heard]  # kept when there is an answer: without one, the same can be sent again
        for _ in range(MOST_CALLS):
            told = await self._chat.ask(messages, self._tools)
            calls = told.get("tool_calls") or []
            kept = {"role": "assistant", "content": told.get("content") or ""}
            messages.append({**kept, "tool_calls": calls} if calls else kept)
            if not calls:
                self._messages = messages
                return _said(kept["content"])
            messages += [await self._call(call) for call in calls]
        raise ModelError(f"the user model has called {MOST_CALLS} tools and said nothing")

    async def _call(self, call: Any) -> dict[str, Any]:
        try:
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"] or "{}")
            content = await self._state.call("user", name, arguments)
        except Exception as exc:  # the benchmark shows every error of a tool to the model that called it
            content = f"Error: {exc}"
        id = call.get("id", "") if isinstance(call, dict) else ""
        return {"role": "tool", "tool_call_id": id, "content": str(content)}


def _offered(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.schema}
    return {"type": "function", "function": function}


def _said(text: str) -> Said:
    found = [token for token in ENDINGS if token in text]
    for token in found:
        text = text.replace(token, "")
    return Said(text.strip(), ENDINGS[found[0]] if found else "")


class ScriptedUser:
    """A user without a model: says what the scenario says, piece by piece, does what it is asked to with its
    telephone, agrees to what it is asked, and ends when it is asked nothing more. Always the same to the same words."""

    def __init__(self, state: State) -> None:
        self._state = state
        scenario = state.task.user_scenario.instructions
        if isinstance(scenario, str):
            self._reason, self._pieces = _spoken(scenario), []
        else:
            known = " ".join(_spoken(text) for text in (scenario.known_info, scenario.unknown_info) if text)
            wishes = _spoken(scenario.task_instructions, wishes=True)
            self._reason = _spoken(scenario.reason_for_call)
            self._pieces = [piece for piece in (known, wishes) if piece]

    async def answer(self, message: str | None) -> Said:
        if message is None:
            return Said(self._reason)
        if self._state.transferred:
            return Said("Thank you, I will wait for the human agent.", "transfer")
        done = [await self._use(call) for call in phone.asked(message, self._state.domain.user_tools)]
        if done:
            return Said("\n".join(done))
        if self._pieces:
            return Said(self._pieces.pop(0))
        if "?" in message:
            return Said("Yes, please go ahead.")
        return Said("Thank you, that is all.", "stop")

    async def _use(self, call: phone.Call) -> str:
        try:
            return await self._state.call("user", call.name, call.arguments)
        except Exception as exc:  # as for a model: the user reads what the telephone says
            return f"That did not work: {exc}"


_PERSONS = {
    "you were": "I was",
    "you are": "I am",
    "you're": "I'm",
    "are you": "am I",
    "yourself": "myself",
    "yours": "mine",
    "your": "my",
    "you": "I",
}
_PERSON = re.compile(rf"\b({'|'.join(_PERSONS)})\b", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
_HIDDEN = re.compile(r"\breveal|\bmention|\bthe agent\b|\bAgent\b")


def _spoken(text: str, *, wishes: bool = False) -> str:
    """A scenario, which speaks to the user, in the user's own words: without what the user is to keep to itself.
    With ``wishes``, only sentences that say what the user wants or does."""
    sentences = [sentence.strip() for sentence in _SENTENCE.split(text)]
    kept = (one for one in sentences if len(one) > 1 and not _HIDDEN.search(one))
    if wishes:
        kept = (one for one in kept if one.startswith(("You want", "You do", "You would", "You can", "You need")))
    return " ".join(_PERSON.sub(_first_person, one) for one in kept)


def _first_person(found: re.Match[str]) -> str:
    text = _PERSONS[found[0].lower()]
    return text[0].upper() + text[1:] if found[0][0].isupper() else text
