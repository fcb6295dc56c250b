"""``aenv rollout``: episodes of an agent, from the command line, kept in a folder that can be gone on with."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from aenv.cli.output import FAILED, label, output_option, say, show_json, show_record, show_table, stdout_reserved
from aenv.cli.platform import pairs_option, system_option
from aenv.cli.progress import Progress
from aenv.cli.project import run_async
from aenv.errors import Invalid, NotFound
from aenv.rl.batches import Stragglers, rollouts
from aenv.rl.files import NAME
from aenv.rl.playing import Agent
from aenv.rl.rules import Rules
from aenv.rl.runs import LABEL, PAGE, REPORT, Asked, Run, tasks_digest, write_whole
from aenv.rl.tasks import Task
from aenv.rl.trajectory import Failed

_SETTINGS = (
    *("max_turns", "turn_timeout", "episode_timeout", "score_late", "reuse"),
    *("system", "parameter", "model_url", "tokens"),
)
"""Options that an episode depends on, and that are the same for all of a run."""
MOST_SHOWN = 1000
"""Episodes that the page of a run shows."""


@click.command()
@click.argument("env")
@click.option(
    "-a",
    "--agent",
    required=True,
    metavar="AGENT",
    help="Who plays: openai:MODEL, module:function or file.py:function, an async function of (env, task).",
)
@click.option(
    "--tasks",
    "tasks_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="What is played: a file with a task a line, as JSON, or an instruction as a JSON text.",
)
@click.option("--instruction", default="", help="The one task, where there is no file of them.")
@click.option("-n", "n", type=click.IntRange(1), default=1, help="Episodes of each task: its group.")
@click.option("--limit", type=click.IntRange(1), help="Most tasks to play, from the first on.")
@click.option("--seed", type=int, default=0, help="What the seeds of all episodes follow from.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of the run.  [default: runs/...]")
@click.option("--resume", is_flag=True, help="Go on with the run in --out: play what has not ended yet.")
@click.option("--retry-failed", is_flag=True, help="With --resume: play those that failed once more.")
@click.option("-c", "--concurrency", type=click.IntRange(1), default=32, help="Most episodes at a time.")
@click.option("--prefetch", type=click.IntRange(0), default=0, help="Instances that are started ahead of their turn.")
@click.option("--reuse", type=click.IntRange(1), help="Episodes that an instance plays, each begun by a reset.")
@click.option("--max-turns", type=click.IntRange(1), help="Turns after which an agent is stopped, and scored.")
@click.option("--turn-timeout", type=float, help="Most seconds for the model to answer, and for each tool.")
@click.option("--episode-timeout", type=float, help="Most seconds for all that an agent does.")
@click.option("--score-late", is_flag=True, help="Score an episode whose time is over, instead of failing it.")
@click.option(
    "--stragglers", type=float, metavar="FACTOR", help="Give up who takes so many times as long as its group."
)
@click.option("--retries", type=click.IntRange(0), help="How often an episode that the platform lost is begun anew.")
@click.option("--reward", "rewards", multiple=True, metavar="NAME[=WEIGHT]", help="A reward to take. Repeatable.")
@click.option("--ttl", help="How long an instance may live.")
@click.option("--model-url", help="Where the model is asked. Also: OPENAI_BASE_URL.")
@click.option("--system", default="", help="System prompt of a model, where a task has none.")
@click.option("--tokens", is_flag=True, help="Ask the model's server for token ids and log-probabilities.")
@pairs_option("-p", "--parameter", help="Sent to the model, such as temperature=0.7.")
@pairs_option("-e", "--env-var", help="A variable of the instances.")
@system_option
@output_option
def rollout(**options: Any) -> int:
    """Run episodes of an agent, and keep what they were scored.

    ENV is a name as in Environment: of the project here, a built-in one, or, with a platform, one of its hub. Every
    episode ends with a score or with a typed failure, which is no score; both are written to trajectories.jsonl in the
    folder of the run as they end. A run that was killed goes on with --resume.

    \b
    Example:
      aenv rollout mini-terminal --agent agent.py:play --tasks tasks.jsonl -n 8
      aenv rollout word-game --agent openai:my-model --model-url http://localhost:8000/v1 --max-turns 20
      aenv rollout mini-terminal --agent agent.py:play --tasks tasks.jsonl -n 8 --out runs/one --resume
    """
    output, begun = options["output"], time.monotonic()
    with stdout_reserved() as stdout:
        tasks = _tasks(options["tasks_file"], options["instruction"])[: options["limit"]]
        agent = _agent(options)
        rules = _rules(options)
        asked = Asked(
            env=options["env"],
            agent=options["agent"],
            tasks=tasks_digest(tasks),
            n=options["n"],
            seed=options["seed"],
            rewards={reward.key: reward.weight for reward in rules.taken},
            settings={name: options[name] for name in _SETTINGS if options[name]},
        )
        if options["resume"] and options["out"] is None:
            raise click.UsageError("--resume needs --out: the folder of the run to go on with")
        if options["retry_failed"] and not options["resume"]:
            raise click.UsageError("--retry-failed goes with --resume")
        folder = options["out"] or _folder(options["env"])
        with Run.open(folder, asked, resume=options["resume"], again=options["retry_failed"]) as run:
            if run.resumed:
                say(f"going on in {folder}: {len(run.done)} of {len(tasks) * options['n']} episodes have ended")
            run_async(_played(run, agent, tasks, rules, options), _loop_factory())
            report = {"run": str(folder), **run.tally.shown(), "wall": round(time.monotonic() - begun, 3)}
            write_whole(folder / REPORT, report)
            _page(run)
        if output == "json":
            show_json(report, stdout)
    if output == "table":
        _show(report, run)
    return 0 if report["scored"] or not report["episodes"] else FAILED


async def _played(run: Run, agent: Agent, tasks: list[Task], rules: Rules, options: Mapping[str, Any]) -> None:
    from aenv import http
    from aenv.client.environment import Environment
    from aenv.client.platform import Platform
    from aenv.client.provision import choose

    provision = choose(options["system_url"], None)
    env = Environment(
        options["env"],
        ttl=options["ttl"],
        environment_variables=options["env_var"],
        labels={LABEL: run.about.id},
        provision=provision,
    )
    total = len(tasks) * options["n"]
    progress = Progress(run.tally, total)
    watching = asyncio.create_task(progress.watch())
    try:
        # What a killed run left ends now, and not when its leases do.
        left = await provision.end_all({LABEL: run.about.id}) if run.resumed and isinstance(provision, Platform) else 0
        if left:
            say(f"ended {left} instances that the run had left behind")
        async with rollouts(
            *(env, agent, tasks),
            n=options["n"],
            seed=options["seed"],
            rules=rules,
            concurrency=options["concurrency"],
            prefetch=options["prefetch"],
            reuse=options["reuse"] or 1,
            stragglers=Stragglers(factor=options["stragglers"]) if options["stragglers"] else None,
            skip=run.done,
        ) as going:
            async for trajectory in going:
                run.add(trajectory)
                progress.ended()
    except BaseException:
        watching.cancel()
        progress.done()
        say(f"stopped after {run.tally.episodes} of {total} episodes; '--out {run.folder} --resume' goes on")
        raise
    finally:
        watching.cancel()
        await http.close()
    progress.done()


def _tasks(file: Path | None, instruction: str) -> list[Task]:
    if file is None:
        return [Task.of({"id": "task", "instruction": instruction})]
    if instruction:
        raise click.UsageError("give --tasks or --instruction, not both")
    try:
        lines = file.read_bytes().splitlines()
    except OSError as exc:
        raise NotFound(f"{file} cannot be read: {exc.strerror or exc}") from exc
    tasks: dict[str, Task] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            given = msgspec.json.decode(line)
            if not isinstance(given, (str, dict)):
                raise Invalid(f"{line[:80].decode(errors='replace')} is no task", hint="write a JSON object a line")
            task = Task.of(given)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as exc:
            raise Invalid(f"{file}:{number}: {exc}", hint="write a JSON object a line") from exc
        except Invalid as exc:
            raise Invalid(f"{file}:{number}: {exc.message}", hint=exc.hint) from exc
        if task.id in tasks:
            raise Invalid(f"{file}:{number}: there is a task {task.id!r} already", hint="give each an id of its own")
        tasks[task.id] = task
    if not tasks:
        raise Invalid(f"{file} has no tasks", hint="write a JSON object a line")
    return list(tasks.values())


def _agent(options: Mapping[str, Any]) -> Agent:
    given: str = options["agent"]
    place, colon, name = given.rpartition(":")
    if not colon or not place or not name:
        hint = "use openai:MODEL, module:function or file.py:function"
        raise click.BadParameter(f"{given!r} names no agent; {hint}", param_hint="--agent")
    if given.startswith("openai:"):
        from aenv.rl.models import OpenAIAgent

        return OpenAIAgent(
            given.removeprefix("openai:"),
            base_url=options["model_url"],
            parameters={key: _value(text) for key, text in options["parameter"].items()},
            system=options["system"],
            tokens=options["tokens"],
        )
    module = _module(place)
    agent = getattr(module, name, None)
    if agent is None or not callable(agent):
        raise NotFound(f"{place} has no function {name!r}", hint="an agent is an async function of (env, task)")
    found: Agent = agent
    return found


def _module(place: str) -> Any:
    if not place.endswith(".py"):
        sys.path.insert(0, os.getcwd())
        try:
            return importlib.import_module(place)
        except ImportError as exc:
            raise NotFound(f"the agent's module {place!r} cannot be imported: {exc}") from exc
    path = Path(place).resolve()
    if not path.is_file():
        raise NotFound(f"there is no file {place}", hint="name the file that the agent is in")
    sys.path.insert(0, str(path.parent))
    taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names
    name = f"aenv_agent_{path.stem}" if taken else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _value(text: str) -> Any:
    """A parameter as what it looks like: a number, true, a list, or else a text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _rules(options: Mapping[str, Any]) -> Rules:
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
        **rules,
    )


def _folder(env: str) -> Path:
    return Path("runs", f"{env.partition('@')[0]}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")


def _loop_factory() -> Any:
    from aenv.runtime.server import loop_factory

    return loop_factory()


# The report


def _page(run: Run) -> None:
    from aenv.rl.viewing.html import page

    text = page(run.trajectories(), title=f"{run.about.asked.env}, {run.folder.name}", most=MOST_SHOWN)
    write_whole(run.folder / PAGE, text)


def _show(report: Mapping[str, Any], run: Run) -> None:
    reward = report["reward"]
    shown = {"episodes": report["episodes"], "scored": report["scored"], "failed": report["failed"]}
    if reward is not None:
        shown["reward"] = f"{reward['mean']:.4f} (from {reward['least']:g} to {reward['most']:g})"
    if len(report["components"]) > 1:
        shown |= {f"reward {name}": f"{mean:.4f}" for name, mean in report["components"].items()}
    shown |= {"turns": report["turns"], "begun anew": report["retried"], "seconds": f"{report['wall']:.1f}"}
    show_record({**shown, "trajectories": run.folder / NAME, "page": run.folder / PAGE}, "table")
    if report["failed"]:
        found: dict[tuple[str, str], list[Failed]] = {}
        for trajectory in run.trajectories():
            if (failed := trajectory.failure) is not None:
                found.setdefault((failed.kind, failed.phase), []).append(failed)
        click.echo()
        rows = [[kind, phase, len(all), all[0].reason[:160]] for (kind, phase), all in sorted(found.items())]
        show_table(["failed", "during", "episodes", "for example"], rows)
        if report["scored"]:
            label("warning", f"{report['failed']} episodes have no score: leave them out, they are no zeros")
