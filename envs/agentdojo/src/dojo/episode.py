"""One episode: the environment of a task, the calls made in it, and what the benchmark says of them."""

from __future__ import annotations

import threading
from typing import Any

from agentdojo.agent_pipeline import ToolsExecutor
from agentdojo.functions_runtime import FunctionCall, FunctionsRuntime
from agentdojo.types import ChatAssistantMessage, text_content_block_from_string

from aenv.errors import ToolError
from dojo import catalogue
from dojo.catalogue import Chosen


class Episode:
    """A task from its beginning."""

    def __init__(self, chosen: Chosen, attack: str, model: str) -> None:
        self._chosen = chosen
        self._attack = attack
        self._environment = catalogue.environment(chosen, attack, model)
        self._before = self._environment.model_copy(deep=True)
        self._runtime = FunctionsRuntime(chosen.suite.tools)
        self._executor = ToolsExecutor()
        self._calls: list[FunctionCall] = []
        self._turn = threading.Lock()
        self.answer: str | None = None

    def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """What the benchmark's own executor answers; ``ToolError`` with what it says went wrong."""
        if tool not in self._runtime.functions:
            raise ToolError(f"{tool} is not among the tools of this task")
        with self._turn:
            call = FunctionCall(function=tool, args=arguments)
            self._calls.append(call)
            asked = ChatAssistantMessage(role="assistant", content=None, tool_calls=[call])
            *_, messages, _ = self._executor.query("", self._runtime, self._environment, [asked])
        answered = messages[-1]
        if answered["error"]:
            raise ToolError(answered["error"])
        return "".join(block["content"] for block in answered["content"])

    def judge(self, answer: str) -> dict[str, Any]:
        """Utility, and under an attack whether the attacker got what it wanted."""
        with self._turn:
            utility = self._holds(self._chosen.user, answer)
            found: dict[str, Any] = {"score": float(utility), "utility": float(utility)}
            if self._chosen.injection is not None:
                stops_only = catalogue.stops_only(self._attack)
                succeeded = not utility if stops_only else self._holds(self._chosen.injection, answer)
                found |= {"security": float(not succeeded), "injection_succeeded": succeeded}
            return found

    def _holds(self, task: Any, answer: str) -> bool:
        before, after = (found.model_copy(deep=True) for found in (self._before, self._environment))
        said = [text_content_block_from_string(answer)]
        return bool(self._chosen.suite._check_task_result(task, said, before, after, list(self._calls)))
