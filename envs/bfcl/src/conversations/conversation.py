"""One conversation: whose turn it is, the calls made in each turn, and what the benchmark says of them."""

from __future__ import annotations

import threading
from copy import deepcopy
from typing import Any

from bfcl_eval.constants.default_prompts import DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils
from bfcl_eval.eval_checker.multi_turn_eval.func_source_code import long_context
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call

from aenv.errors import ToolError
from conversations.catalogue import FUNCTIONS, Entry

_MODEL = "agent"
_FAILED = "Error during execution: "
"""How the benchmark begins what it answers to a call that raised."""
_SHARED = {
    name: value for name, value in vars(long_context).items() if name.isupper() and isinstance(value, list | dict)
}
_UNTOUCHED = deepcopy(_SHARED)


def _forget() -> None:
    """Remove every API that the benchmark keeps, and what they did to the data that all of them share."""
    kept = vars(multi_turn_utils)
    for name in [name for name in kept if name.endswith("_instance")]:
        del kept[name]
    for name, value in _SHARED.items():
        if isinstance(value, dict) and value != _UNTOUCHED[name]:
            value.clear()
            value.update(deepcopy(_UNTOUCHED[name]))
        elif value != _UNTOUCHED[name]:
            value[:] = deepcopy(_UNTOUCHED[name])


class Conversation:
    """A conversation from its beginning."""

    def __init__(self, entry: Entry) -> None:
        _forget()
        self._entry = entry
        self._available = {*entry.offered, *entry.early}
        self._turns: list[list[list[str]]] = [[]]
        """The calls of each turn, one to a step."""
        self._is_over = False
        self._lock = threading.Lock()
        self._execute([])

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a function of the conversation's APIs, and give what the benchmark shows a model."""
        with self._lock:
            self._check_going()
            if name not in self._available:
                raise ToolError(f"{name} is not available")
            # The benchmark evaluates calls as text, so nothing but a name may stand where a name is expected.
            if wrong := next((key for key in arguments if not key.isidentifier()), None):
                raise ToolError(f"{name} has no argument {wrong[:100]!r}")
            text = f"{name}({','.join(f'{key}={value!r}' for key, value in arguments.items())})"
            self._turns[-1].append([text])
            (result,) = self._execute([text])
        if result.startswith(_FAILED):
            raise ToolError(result)
        return result

    def next_turn(self) -> dict[str, Any]:
        """End the agent's turn: what the user says then, or that the conversation is over."""
        with self._lock:
            self._check_going()
            turn = len(self._turns)
            if turn == len(self._entry.truth):
                self._is_over = True
                return {"over": True, "user": ""}
            self._turns.append([])
            if added := self._entry.added.get(turn):
                self._available.update(added)
                functions = [FUNCTIONS[name] for name in added]
                said = DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC
                return {"over": False, "user": said, "added_functions": functions}
            return {"over": False, "user": self._entry.said(turn)}

    def judge(self) -> dict[str, Any]:
        """Whether all turns came to their ends as the benchmark's checker wants them."""
        with self._lock:
            turns, wanted = deepcopy(self._turns), self._entry.truth
            live = {name: value for name, value in vars(multi_turn_utils).items() if name.endswith("_instance")}
            found: dict[str, Any] = {"turns": len(turns), "turns_wanted": len(wanted)}
            if len(turns) != len(wanted):
                return {"score": 0.0, **found, "error_type": "multi_turn:force_terminated"}
            _forget()
            try:
                verdict = multi_turn_checker(turns, wanted, self._entry.data, self._entry.category, _MODEL)
            finally:
                _forget()
                vars(multi_turn_utils).update(live)
            errors = {key: verdict[key] for key in ("error_type", "error_message") if key in verdict}
            return {"score": float(verdict["valid"]), **found, **errors}

    def _check_going(self) -> None:
        if self._is_over:
            raise ToolError("the conversation is over")

    def _execute(self, calls: list[str]) -> list[str]:
        entry = self._entry
        results, _ = execute_multi_turn_func_call(
            calls, entry.data["initial_config"], entry.classes, _MODEL, entry.id, long_context=entry.is_long
        )
        return results
