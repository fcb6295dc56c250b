"""The score of an episode by the benchmark's own evaluation, part by part.

A task names the parts that count, its reward basis. The score is 1 when all of them passed and 0 otherwise. A part that
cannot be judged here is named in ``not_judged`` and left out, whether it counts or not.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from inspect_ai.model import ChatMessageAssistant, ModelName
from inspect_ai.scorer import CORRECT, Scorer, Target
from inspect_ai.solver import TaskState
from inspect_evals.tau2.common.agents import StoredAgentState
from inspect_evals.tau2.common.metadata import Tau2MetaData
from inspect_evals.tau2.common.scorer import db_match, evaluate_required_actions, score_communicated_info
from inspect_evals.tau2.data_model.tasks import EvaluationCriteria
from inspect_evals.tau2.telecom.scorer import env_assertions

from aenv.errors import Invalid, ModelError
from tau2_env.carrier import State
from tau2_env.chat import Chat

_PARTS = {
    "DB": "database",
    "ACTION": "actions",
    "COMMUNICATE": "communicate",
    "ENV_ASSERTION": "environment",
    "NL_ASSERTION": "nl_assertions",
}
"""What the benchmark calls its parts, and what they are called here."""
_JUDGE = (
    "You judge a conversation between a customer service agent and a customer. For each expected outcome, say whether "
    'the conversation shows that it is met. Answer with JSON only: {"results": [{"outcome": "...", "reasoning": "...", '
    '"met": true}]}, one entry for each expected outcome, in their order.'
)


async def evaluate(state: State, judge: Chat | None) -> dict[str, Any]:
    """The score and its parts."""
    criteria = state.task.evaluation_criteria or EvaluationCriteria()
    basis = [_PARTS[part.value] for part in criteria.reward_basis]
    parts: dict[str, float] = {}
    seen = _seen(state)
    state.enter()
    for name, scorer in _scorers(state, criteria).items():
        found = await scorer(seen, Target(""))
        parts[name] = float(found is not None and found.value == CORRECT)
    if criteria.nl_assertions and judge is not None:
        parts["nl_assertions"] = float(await _judged(state, criteria.nl_assertions, judge))
    if not any(name in parts for name in basis):
        raise Invalid(
            f"nothing that task {state.task.id} counts could be judged: {', '.join(basis)}",
            hint="give a judge: TAU2_JUDGE_MODEL and TAU2_JUDGE_BASE_URL",
        )
    wanted = {*basis, "nl_assertions"} if criteria.nl_assertions else set(basis)
    return {
        "score": float(all(parts[name] for name in basis if name in parts)),
        **parts,
        "basis": basis,
        "not_judged": sorted(wanted - set(parts)),
    }


def _scorers(state: State, criteria: EvaluationCriteria) -> dict[str, Scorer]:
    """The benchmark's scorers that say something about the task."""
    found: dict[str, Scorer] = {"communicate": score_communicated_info()}
    if state.domain.name == "telecom":
        found["environment"] = env_assertions()
    else:
        found["database"] = db_match(domain=state.domain.name)
    found["actions"] = evaluate_required_actions(get_agent_state=_agent(state))
    return found


def _agent(state: State) -> Callable[[str], StoredAgentState]:
    return lambda instance: StoredAgentState(store=state.store, instance=instance, messages=state.agent_calls)


def _seen(state: State) -> TaskState:
    """The episode as the benchmark's scorers want to see it."""
    return TaskState(
        model=ModelName("none/none"),
        sample_id=state.task.id,
        epoch=1,
        input=[],
        messages=list(state.conversation),
        metadata=Tau2MetaData(instance="agent", task=state.task).model_dump(),
    )


async def _judged(state: State, assertions: list[str], judge: Chat) -> bool:
    """Whether a model says of every assertion that it holds."""
    lines = [
        f"{'agent' if not isinstance(message, ChatMessageAssistant) else 'customer'}: {message.text}"
        for message in state.conversation
        if message.text
    ]
    wanted = "\n".join(f"{number}. {text}" for number, text in enumerate(assertions, 1))
    asked = (
        f"<conversation>\n{chr(10).join(lines)}\n</conversation>\n<expected_outcomes>\n{wanted}\n</expected_outcomes>"
    )
    told = await judge.ask([{"role": "system", "content": _JUDGE}, {"role": "user", "content": asked}])
    try:
        text = str(told.get("content"))
        results = json.loads(text[text.index("{") : text.rindex("}") + 1])["results"]
        met = [result["met"] for result in results]
    except (ValueError, KeyError, TypeError):
        raise ModelError("the judge model's answer is not the JSON that it was asked for") from None
    if len(met) != len(assertions) or not all(isinstance(one, bool) for one in met):
        raise ModelError(
            f"the judge model has judged {len(met)} of {len(assertions)} assertions, or not by true and false"
        )
    return all(met)
