"""Which tasks there are, what they are called, and what an attack puts into their environment."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import agentdojo.attacks  # noqa: F401 - it registers them
from agentdojo.agent_pipeline import GroundTruthPipeline
from agentdojo.attacks.attack_registry import ATTACKS, load_attack
from agentdojo.attacks.base_attacks import BaseAttack
from agentdojo.base_tasks import BaseInjectionTask, BaseUserTask
from agentdojo.functions_runtime import Function, TaskEnvironment
from agentdojo.models import MODEL_NAMES
from agentdojo.task_suite.load_suites import get_suites
from agentdojo.task_suite.task_suite import TaskSuite

from aenv.errors import Invalid, did_you_mean

VERSION = "v1.2.2"
"""Of the benchmark's tasks: the newest that the package holds."""
ALL = "all"
SUITES: dict[str, TaskSuite[Any]] = get_suites(VERSION)
TOOLS: dict[str, Function[..., Any]] = {tool.name: tool for suite in SUITES.values() for tool in suite.tools}
"""By name. Suites that have a tool of the same name have the same tool."""
ATTACK = "important_instructions"
"""The attack that the benchmark's authors report, where only an injection is named."""
_BY_HAND = "manual"
"""An attack that asks a person for its texts."""


class Chosen(NamedTuple):
    """A user task, and the injection task that an attacker wants done instead."""

    suite: TaskSuite[Any]
    user: BaseUserTask[Any]
    injection: BaseInjectionTask[Any] | None = None

    @property
    def id(self) -> str:
        parts = [self.suite.name, self.user.ID]
        return "-".join([*parts, self.injection.ID] if self.injection else parts)


def suites(domain: str) -> list[TaskSuite[Any]]:
    """One suite by name, or all of them."""
    if domain == ALL:
        return list(SUITES.values())
    if domain not in SUITES:
        raise Invalid(f"AgentDojo has no suite {domain!r}", hint=did_you_mean(domain, [*SUITES, ALL]))
    return [SUITES[domain]]


def choose(domain: str, attack: str, injection: str) -> Iterator[Chosen]:
    """Every user task of a suite, or each with every injection task that the attack is meant for."""
    for suite in suites(domain):
        for user in suite.user_tasks.values():
            if attack:
                for found in _injections(suite, attack, injection):
                    yield Chosen(suite, user, found)
            else:
                yield Chosen(suite, user)


def find(task: str) -> Chosen:
    """The task of this id."""
    name, _, rest = task.partition("-")
    user, _, injection = rest.partition("-")
    if name not in SUITES or user not in SUITES[name].user_tasks:
        known = [chosen.id for chosen in choose(name if name in SUITES else ALL, "", "")]
        raise Invalid(f"AgentDojo has no task {task!r}", hint=did_you_mean(task, known))
    suite = SUITES[name]
    chosen = Chosen(suite, suite.user_tasks[user])
    return chosen._replace(injection=_injection(suite, injection)) if injection else chosen


def environment(chosen: Chosen, attack: str, model: str) -> TaskEnvironment:
    """A new environment for the task, with the attacker's texts in it where there is one."""
    if chosen.injection is None:
        found = _untouched(chosen.suite.name).model_copy(deep=True)
    else:
        texts = attacker(chosen.suite.name, attack, model).attack(chosen.user, chosen.injection)
        found = chosen.suite.load_and_inject_default_environment(texts)
    return chosen.user.init_environment(found)


@cache
def attacker(suite: str, attack: str, model: str) -> BaseAttack:
    """The benchmark's own attack. Some address their victim: ``model`` is what AgentDojo calls it."""
    known = [name for name in ATTACKS if name != _BY_HAND]
    if attack not in known:
        raise Invalid(f"AgentDojo has no attack {attack!r}", hint=did_you_mean(attack, known))
    if model not in MODEL_NAMES:
        raise Invalid(f"AgentDojo has no name for the model {model!r}", hint=did_you_mean(model, MODEL_NAMES))
    victim = GroundTruthPipeline(None)
    victim.name = model
    return load_attack(attack, SUITES[suite], victim)


def stops_only(attack: str) -> bool:
    """Whether all that the attack wants is that the user's task is not done."""
    return bool(ATTACKS[attack].is_dos_attack)


@cache
def _untouched(suite: str) -> TaskEnvironment:
    found: TaskEnvironment = SUITES[suite].load_and_inject_default_environment({})
    return found


def _injections(suite: TaskSuite[Any], attack: str, injection: str) -> list[BaseInjectionTask[Any]]:
    if injection:
        return [_injection(suite, injection)]
    found = list(suite.injection_tasks.values())
    return found[:1] if stops_only(attack) else found


def _injection(suite: TaskSuite[Any], injection: str) -> BaseInjectionTask[Any]:
    if injection not in suite.injection_tasks:
        hint = did_you_mean(injection, suite.injection_tasks)
        raise Invalid(f"the suite {suite.name} has no injection task {injection!r}", hint=hint)
    return suite.injection_tasks[injection]


for _name in SUITES:
    _untouched(_name)  # parsed before instances fork, so that a reset is a copy
