"""What ``aenv rollout`` and ``aenv eval`` have in common: the options of a run, and how it is played and kept."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from aenv.cli.output import output_option, say, show_table
from aenv.cli.platform import pairs_option, system_option
from aenv.cli.progress import Progress
from aenv.cli.project import run_async
from aenv.client.environment import Environment
from aenv.client.platform import Platform
from aenv.client.provision import choose
from aenv.errors import Invalid
from aenv.evals import agents
from aenv.evals.runner import asking
from aenv.evals.tasksets import Taskset
from aenv.models import to_json
from aenv.rl.batches import Stragglers
from aenv.rl.playing import Agent
from aenv.rl.rules import Rules
from aenv.rl.runs import LABEL, Again, Run
from aenv.rl.trajectory import Failed

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
MOST_SHOWN = 1000
"""Episodes that the page of a run shows."""
_SETTINGS = ("reuse", "system", "parameter", "model_url", "tokens")
"""Options that an episode depends on beside its rules, and that are the same for all of a run."""


def _check_agent(ctx: click.Context, option: click.Parameter, given: str) -> str:
    try:
        agents.check(given)
    except Invalid as exc:
        raise click.BadParameter(f"{exc.message}; {exc.hint}", ctx, option) from None
    return given


def agent_option(**more: Any) -> Callable[[F], F]:
    """``--agent``."""
    told = f"Who plays: {agents.NAMES}. A function is async, of (env, task)."
    return click.option("-a", "--agent", metavar="AGENT", callback=_check_agent, help=told, **more)


def run_options(command: F) -> F:
    """The options of everything that plays episodes, but for who plays what."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.option("--limit", type=click.IntRange(1), help="Most tasks to play, from the first on."),
    click.option("--seed", type=int, default=0, help="What the seeds of all episodes follow from."),
    click.option(
        "--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of the run.  [default: runs/...]"
    ),
    click.option("--resume", is_flag=True, help="Go on with the run in --out: play what has not ended yet."),
    click.option("--retry-failed", is_flag=True, help="With --resume: play those that failed once more."),
    click.option("-c", "--concurrency", type=click.IntRange(1), default=32, help="Most episodes at a time."),
    click.option(
        "--prefetch", type=click.IntRange(0), default=0, help="Instances that are started ahead of their turn."
    ),
    click.option("--reuse", type=click.IntRange(1), help="Episodes that an instance plays, each begun by a reset."),
    click.option("--max-turns", type=click.IntRange(1), help="Turns after which an agent is stopped, and scored."),
    click.option("--turn-timeout", type=float, help="Most seconds for the model to answer, and for each tool."),
    click.option("--episode-timeout", type=float, help="Most seconds for all that an agent does."),
    click.option("--score-late", is_flag=True, help="Score an episode whose time is over, instead of failing it."),
    click.option(
        "--stragglers", type=float, metavar="FACTOR", help="Give up who takes so many times as long as its group."
    ),
    click.option(
        "--retries", type=click.IntRange(0), help="How often an episode that the platform lost is begun anew."
    ),
    click.option(
        "--fast-forward", is_flag=True, help="Go on in another instance where one is lost, if that comes to the same."
    ),
    click.option("--reward", "rewards", multiple=True, metavar="NAME[=WEIGHT]", help="A reward to take. Repeatable."),
    click.option("--ttl", help="How long an instance may live."),
    click.option("--model-url", help="Where the model is asked. Also: OPENAI_BASE_URL."),
    click.option("--system", default="", help="System prompt of a model, where a task has none."),
    click.option("--tokens", is_flag=True, help="Ask the model's server for token ids and log-probabilities."),
    pairs_option("-p", "--parameter", help="Sent to the model, such as temperature=0.7."),
    pairs_option("-e", "--env-var", help="A variable of the instances."),
    system_option,
    output_option,
)


# From options to what they mean


def check_options(options: Mapping[str, Any]) -> None:
    """Whether options go together."""
    if options["resume"] and options["out"] is None:
        raise click.UsageError("--resume needs --out: the folder of the run to go on with")
    if options["retry_failed"] and not options["resume"]:
        raise click.UsageError("--retry-failed goes with --resume")


def agent_of(options: Mapping[str, Any]) -> Agent:
    return agents.agent(
        options["agent"],
        base_url=options["model_url"],
        parameters={key: _value(text) for key, text in options["parameter"].items()},
        system=options["system"],
        tokens=options["tokens"],
    )


def _value(text: str) -> Any:
    """A parameter as what it looks like: a number, true, a list, or else a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def rules_of(options: Mapping[str, Any]) -> Rules:
    weights = {}
    for text in options["rewards"]:
        name, equals, weight = text.partition("=")
        try:
            weights[name] = float(weight) if equals else 1.0
        except ValueError:
            raise click.BadParameter(f"{weight!r} in {text!r} is no weight", param_hint="--reward") from None
    rules: dict[str, Any] = {} if options["retries"] is None else {"retries": options["retries"]}
    return Rules(
        rewards=weights or None,
        max_turns=options["max_turns"],
        turn_timeout=options["turn_timeout"],
        episode_timeout=options["episode_timeout"],
        score_late=options["score_late"],
        fast_forward=options["fast_forward"],
        **rules,
    )


def environment_of(options: Mapping[str, Any], labels: Mapping[str, str] | None = None) -> Environment:
    """What every instance is made like."""
    return Environment(
        options["env"],
        ttl=options.get("ttl"),
        environment_variables=options["env_var"],
        labels=labels,
        provision=choose(options["system_url"], None),
    )


# The run


def open_run(options: Mapping[str, Any], tasks: Taskset, rules: Rules, again: Again) -> Run:
    """The run in its folder, begun or gone on with; ``again`` tells what --retry-failed plays once more."""
    settings = {**{name: options[name] for name in _SETTINGS}, "reuse": options["reuse"] or 1}
    if options["env_var"]:  # not as they are: keys may be among them
        settings["variables"] = hashlib.sha256(to_json(sorted(options["env_var"].items()))).hexdigest()
    asked = asking(tasks, options["agent"], options["n"], options["seed"], rules, **settings)
    folder = options["out"] or _folder(options["env"])
    return Run.open(folder, asked, resume=options["resume"], again=again if options["retry_failed"] else None)


def _folder(env: str) -> Path:
    return Path("runs", f"{env.partition('@')[0]}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")


async def play(run: Run, agent: Agent, tasks: Taskset, rules: Rules, options: Mapping[str, Any]) -> None:
    """Play what has not ended yet, with words on how it goes."""
    labels = {LABEL: run.about.id}
    total = len(tasks) * options["n"]
    if run.resumed:
        say(f"going on in {run.folder}: {len(run.done)} of {total} episodes have ended")
        provision = choose(options["system_url"], None)
        # What a killed run left ends now, and not when its leases do.
        if isinstance(provision, Platform) and (left := await provision.end_all(labels)):
            say(f"ended {left} instances that the run had left behind")
    progress = Progress(run.tally, total)
    watching = asyncio.create_task(progress.watch())
    try:
        await run.play(
            *(environment_of(options, labels), agent, tasks.tasks, progress.ended),
            rules=rules,
            concurrency=options["concurrency"],
            prefetch=options["prefetch"],
            reuse=options["reuse"] or 1,
            stragglers=Stragglers(factor=options["stragglers"]) if options["stragglers"] else None,
        )
    except BaseException:
        watching.cancel()
        progress.done()
        say(f"stopped after {run.tally.episodes} of {total} episodes; '--out {run.folder} --resume' goes on")
        raise
    finally:
        watching.cancel()
    progress.done()


def run_closing(work: Coroutine[Any, Any, T]) -> T:
    """Run to its end what plays episodes, and close its connections."""
    from aenv import http
    from aenv.runtime.server import loop_factory

    async def closing() -> T:
        try:
            return await work
        finally:
            await http.close()

    return run_async(closing(), loop_factory())


def show_failures(run: Run) -> None:
    """Why episodes of a run failed, by where that was."""
    if not run.tally.failed:
        return
    found: dict[tuple[str, str], list[Failed]] = {}
    for trajectory in run.trajectories():
        if (failed := trajectory.failure) is not None:
            found.setdefault((failed.kind, failed.phase), []).append(failed)
    click.echo()
    rows = [[kind, phase, len(all), all[0].reason[:160]] for (kind, phase), all in sorted(found.items())]
    show_table(["failed", "during", "episodes", "for example"], rows)
