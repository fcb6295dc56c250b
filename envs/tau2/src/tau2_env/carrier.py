"""The benchmark as the package inspect-evals carries it: domains, tasks, tools, and what the tools act on.

The package reads a database from its file for every state that it makes. Here it is read once, when this module is
imported, and copied; ids that the package draws come from Python's ``random``, so that a seed decides them.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import re
import types
import uuid
from collections.abc import Awaitable, Callable
from copy import copy
from functools import lru_cache, partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from inspect_ai.model import ChatMessageAssistant, ChatMessageUser
from inspect_ai.tool import ToolCall, ToolDef
from inspect_ai.tool import ToolError as Refused
from inspect_ai.util import Store
from inspect_ai.util._store import init_subtask_store
from inspect_evals.tau2.airline.agents import get_domain_policy as airline_policy
from inspect_evals.tau2.airline.data_model import FlightDB
from inspect_evals.tau2.airline.tools import all_airline_tools
from inspect_evals.tau2.data_model.tasks import Task
from inspect_evals.tau2.retail.agents import get_domain_policy as retail_policy
from inspect_evals.tau2.retail.data_model import RetailDB
from inspect_evals.tau2.retail.tools import all_retail_tools
from inspect_evals.tau2.telecom.agents import get_domain_policy as telecom_policy
from inspect_evals.tau2.telecom.data_model import TelecomDB
from inspect_evals.tau2.telecom.environment import get_environment
from inspect_evals.tau2.telecom.solver import perform_action
from inspect_evals.tau2.telecom.tools import all_telecom_agent_tools
from inspect_evals.tau2.telecom.user_data_model import TelecomUserDB
from inspect_evals.tau2.telecom.user_tools import all_telecom_user_tools
from inspect_evals.tau2.utils import TAU2_DATA_DIR, USER_SIMULATOR_GUIDELINES, USER_SIMULATOR_GUIDELINES_WITH_TOOLS
from pydantic_core import to_jsonable_python

from aenv import Invalid, ToolError
from aenv.errors import did_you_mean, nearest
from tau2_env.copies import Original, digest

PACKAGE = "inspect-evals"
CORRECTED = {("airline", id): ("cancel_reservation", "send_certificate") for id in ("2", "9", "27", "38")}
"""Tasks whose gold broke the policy, and which the benchmark has corrected since: the package still has them as they
were, with actions that are left out here, so that scores are those of the benchmark."""
Who = Literal["assistant", "user"]


class Tool(NamedTuple):
    """A tool of the benchmark, with the description and schema that the benchmark shows to models."""

    name: str
    description: str
    schema: dict[str, Any]
    call: Callable[..., Awaitable[str]]

    @classmethod
    def of(cls, made: Callable[[], Any]) -> Tool:
        call = made()
        about = ToolDef(call)
        return cls(about.name, about.description, about.parameters.model_dump(exclude_none=True), call)


class Domain:
    """A domain, its tasks in the order of the benchmark, and its tools."""

    def __init__(self, name: str, policy: str, guidelines: str, tools: list[Any], user_tools: list[Any]) -> None:
        self.name = name
        self.policy = policy
        self.guidelines = guidelines
        self.tools = {tool.name: tool for tool in map(Tool.of, tools)}
        self.user_tools = {tool.name: tool for tool in map(Tool.of, user_tools)}
        self.source = {"name": PACKAGE, "version": version(PACKAGE)}
        self._take(TAU2_DATA_DIR / "domains" / name)
        for record in self._records.values():
            criteria, wrong = record["evaluation_criteria"], CORRECTED.get((name, record["id"]), ())
            if wrong:
                criteria["actions"] = [action for action in criteria["actions"] if action["name"] not in wrong]

    def with_tasks_of(self, folder: Path) -> Domain:
        """The same domain with the tasks of a folder, as the repository of the benchmark has one for each domain."""
        found = copy(self)
        found.source = {"name": "datasource", "version": hashlib.sha256(_bytes(folder / "tasks.json")).hexdigest()[:12]}
        found._take(folder)
        return found

    def _take(self, folder: Path) -> None:
        self._records = {public_id(record["id"]): record for record in json.loads(_bytes(folder / "tasks.json"))}
        splits = {split: set(ids) for split, ids in json.loads(_bytes(folder / "split_tasks.json")).items()}
        self._splits = {
            split: [id for id, record in self._records.items() if record["id"] in ids] for split, ids in splits.items()
        }

    def ids(self, split: str) -> list[str]:
        """The tasks of a split."""
        if split not in self._splits:
            raise Invalid(f"{self.name} has no split {split!r}", hint=did_you_mean(split, self._splits))
        return self._splits[split]

    def task(self, id: str) -> Task:
        """A task by our id, or by the benchmark's own."""
        record = self._records.get(id) or self._records.get(public_id(id))
        if record is None:
            near = nearest(id, self._records)
            hint = f"did you mean {near!r}?" if near else "the function tasks lists them"
            raise Invalid(f"{self.name} has no task {id[:100]!r}", hint=hint)
        return Task.model_validate(record)


def public_id(id: str) -> str:
    """An id that can be shown to an agent: those of telecom are a list of what is wrong with the telephone."""
    kind = re.match(r"\[(\w+)\]", id)
    return f"{kind[1]}-{hashlib.sha256(id.encode()).hexdigest()[:10]}" if kind else id


class State:
    """What one episode has come to: the databases, and who has called which tools and said what."""

    def __init__(self, domain: Domain, task: Task) -> None:
        self.domain = domain
        self.task = task
        self.store = Store()
        self.agent_calls: list[ChatMessageAssistant] = []
        self.conversation: list[ChatMessageUser | ChatMessageAssistant] = []
        """As the simulated user sees it: the agent's words are the other side's."""
        self.enter()
        if domain.name == "telecom":
            environment = get_environment()
            begin = task.initial_state
            for action in (begin and begin.initialization_actions) or []:
                perform_action(environment, action)

    def enter(self) -> None:
        """Let the benchmark's code that runs in this context find this state."""
        init_subtask_store(self.store)

    async def call(self, who: Who, name: str, arguments: dict[str, Any]) -> str:
        """Let the agent or the user call a tool of theirs."""
        tools = self.domain.tools if who == "assistant" else self.domain.user_tools
        if name not in tools:
            raise ToolError(f"{self.domain.name} has no tool {name!r}", hint=did_you_mean(name, tools))
        call = ToolCall(id=uuid.uuid4().hex, function=name, arguments=to_jsonable_python(arguments))
        kept = self.agent_calls if who == "assistant" else self.conversation
        kept.append(ChatMessageAssistant(content="", tool_calls=[call]))
        self.enter()
        try:
            return await tools[name].call(**arguments)
        except Refused as exc:
            raise ToolError(str(exc)) from exc

    def say(self, who: Who, text: str) -> None:
        """Keep what the agent or the user said."""
        said = ChatMessageUser if who == "assistant" else ChatMessageAssistant
        self.conversation.append(said(content=text))

    @property
    def transferred(self) -> bool:
        """Whether the agent has handed the user over to a human."""
        calls = (call for message in self.agent_calls for call in message.tool_calls or [])
        return any(call.function == "transfer_to_human_agents" for call in calls)


@lru_cache
def domain(name: str, datasource: str = "") -> Domain:
    """The domain of that name, with the tasks of the package or with those of a datasource."""
    if name not in DOMAINS:
        raise Invalid(f"there is no domain {name[:100]!r}", hint=did_you_mean(name, DOMAINS))
    if not datasource:
        return DOMAINS[name]
    try:
        return DOMAINS[name].with_tasks_of(Path(datasource, "tau2", "domains", name))
    except FileNotFoundError as exc:
        hint = "give the folder data of the benchmark's repository, in which there is tau2/domains"
        raise Invalid(f"the datasource has no tasks of {name}: {exc.filename} is not there", hint=hint) from exc
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise Invalid(f"the datasource's tasks of {name} cannot be read: {type(exc).__name__}: {exc}") from exc


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return gzip.decompress(path.with_name(f"{path.name}.gz").read_bytes())


def _keep_databases() -> None:
    """Let the benchmark's database classes copy what was read once, instead of reading it again."""
    data = TAU2_DATA_DIR / "domains"
    read = {
        FlightDB: FlightDB.model_validate(json.loads(_bytes(data / "airline" / "db.json"))),
        RetailDB: RetailDB.model_validate(json.loads(_bytes(data / "retail" / "db.json"))),
        TelecomDB: TelecomDB.load(str(data / "telecom" / "db.toml")),
        TelecomUserDB: TelecomUserDB.load(str(data / "telecom" / "user_db.toml")),
    }
    for kind, db in read.items():
        kind.load = staticmethod(partial(_copy, Original(db)))
    for kind in (FlightDB, RetailDB):
        kind.get_hash = digest


def _copy(original: Original, path: str) -> Any:
    return original.copy()


def _drawn() -> uuid.UUID:
    return uuid.UUID(int=random.getrandbits(128), version=4)


_keep_databases()
import_module("inspect_evals.tau2.telecom.TelecomAgentTools").uuid = types.SimpleNamespace(uuid4=_drawn)
DOMAINS = {
    "airline": Domain("airline", airline_policy(), USER_SIMULATOR_GUIDELINES, all_airline_tools, []),
    "retail": Domain("retail", retail_policy(), USER_SIMULATOR_GUIDELINES, all_retail_tools, []),
    "telecom": Domain(
        "telecom",
        telecom_policy(workflow=False),
        USER_SIMULATOR_GUIDELINES_WITH_TOOLS,
        all_telecom_agent_tools,
        all_telecom_user_tools,
    ),
}
