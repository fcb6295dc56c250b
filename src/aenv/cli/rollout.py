"""``aenv rollout``: episodes of an agent, from the command line, kept in a folder that can be gone on with."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from aenv.cli.output import FAILED, label, show_json, show_record, stdout_reserved
from aenv.cli.playing import (
    MOST_SHOWN,
    agent_of,
    agent_option,
    check_options,
    open_run,
    play,
    rules_of,
    run_closing,
    run_options,
    show_failures,
)
from aenv.evals.tasksets import Taskset
from aenv.rl.files import NAME
from aenv.rl.runs import PAGE, REPORT, Run, write_whole
from aenv.rl.tasks import Task, read_tasks


@click.command()
@click.argument("env")
@agent_option(required=True)
@click.option(
    "--tasks",
    "tasks_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="What is played: a file with a task a line, as JSON, or an instruction as a JSON text.",
)
@click.option("--instruction", default="", help="The one task, where there is no file of them.")
@click.option("-n", "n", type=click.IntRange(1), default=1, help="Episodes of each task: its group.")
@run_options
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
        check_options(options)
        tasks = Taskset(env=options["env"], tasks=tuple(_tasks(options["tasks_file"], options["instruction"])))
        tasks = tasks.head(options["limit"] or len(tasks))
        agent, rules = agent_of(options), rules_of(options)
        with open_run(options, tasks, rules, again=lambda _: True) as run:
            run_closing(play(run, agent, tasks, rules, options))
            report = {"run": str(run.folder), **run.tally.shown(), "wall": round(time.monotonic() - begun, 3)}
            write_whole(run.folder / REPORT, report)
            _page(run)
        if output == "json":
            show_json(report, stdout)
    if output == "table":
        _show(report, run)
    return 0 if report["scored"] or not report["episodes"] else FAILED


def _tasks(file: Path | None, instruction: str) -> list[Task]:
    if file is None:
        return [Task.of({"id": "task", "instruction": instruction})]
    if instruction:
        raise click.UsageError("give --tasks or --instruction, not both")
    return read_tasks(file)


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
    show_failures(run)
    if run.tally.failed and run.tally.scored:
        label("warning", f"{run.tally.failed} episodes have no score: leave them out, they are no zeros")
