"""``aenv eval``: an agent on the tasks of an environment; and ``aenv compare``: two of those."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from aenv.cli.output import FAILED, label, output_option, say, show_json, show_record, show_table, stdout_reserved
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
from aenv.cli.tasks import selection_options, tasks_option, taskset_of
from aenv.evals import report, statistics
from aenv.evals.comparing import Comparison, Pair
from aenv.evals.comparing import compare as compare_both
from aenv.evals.results import Evaluation, TaskResult
from aenv.evals.runner import evaluated, reusable
from aenv.evals.tasksets import Taskset
from aenv.rl.files import NAME
from aenv.rl.runs import PAGE, REPORT, Run, write_whole

threshold_option = click.option("--threshold", type=float, default=statistics.PASSED, help="Least score that passes.")
LISTED = 20
"""Tasks of one kind that a terminal shows."""


def _numbers(ctx: click.Context, option: click.Parameter, given: str) -> tuple[int, ...]:
    try:
        found = sorted({int(text) for text in given.split(",")}) if given else []
    except ValueError:
        raise click.BadParameter(f"{given!r} is no list of numbers, such as 1,4", ctx, option) from None
    if found and found[0] < 1:
        raise click.BadParameter(f"{found[0]} is no number of samples", ctx, option)
    return tuple(found)


@click.command("eval")
@click.argument("env")
@agent_option(default="oracle")
@tasks_option
@selection_options
@click.option("--shuffle", is_flag=True, help="Play the tasks in another order, which follows from --seed.")
@click.option("-n", "n", type=click.IntRange(1), help="Episodes of each task.  [default: the largest k]")
@click.option("--k", "ks", default="", metavar="1,4", callback=_numbers, help="Work out pass@k and pass^k for these.")
@threshold_option
@run_options
def eval_(**options: Any) -> int:
    """Evaluate an agent on the tasks of an environment.

    ENV is a name as in Environment. It tells its tasks by its function 'tasks', and is asked for a part of them by
    --domain, --split and --option. An episode passes with a score of --threshold. One that the platform failed in has
    no score: it is counted apart, and in no rate. One that the agent failed in, by an error of its own or by taking
    too long, has not passed. Intervals have a confidence of 95 %, over tasks.

    Every episode is written to trajectories.jsonl in the folder of the run as it ends; report.html there has plots
    and all episodes. An evaluation that was killed goes on with --resume.

    \b
    Example:
      aenv eval my-benchmark --agent oracle
      aenv eval my-benchmark --domain airline --agent openai:my-model --k 1,4 --max-turns 30
      aenv eval my-benchmark --agent 'cmd: ./my-agent --fast' --tasks '1,2,air-*' --episode-timeout 600
      aenv eval my-benchmark --agent agent.py:play --out runs/one --resume
    """
    most = max(options["ks"], default=1)
    options["n"] = options["n"] or most
    check_options(options)
    if most > options["n"]:
        raise click.UsageError(f"--k {most} needs as many episodes of each task, and -n says {options['n']}")
    begun = time.monotonic()
    with stdout_reserved() as stdout:
        run, found = run_closing(_evaluated(options))
        shown = {**found.shown(), "run": str(run.folder), "wall": round(time.monotonic() - begun, 3)}
        write_whole(run.folder / REPORT, shown)
        title = f"{found.env}, {found.asked.agent}"
        write_whole(run.folder / PAGE, report.page(found, run.trajectories(), title=title, most=MOST_SHOWN))
        if options["output"] == "json":
            show_json(shown, stdout)
    if options["output"] == "table":
        _show(found, run, shown)
    return 0 if found.tally.scored else FAILED


async def _evaluated(options: Mapping[str, Any]) -> tuple[Run, Evaluation]:
    agent, rules = agent_of(options), rules_of(options)
    tasks = _ordered(await taskset_of(options), options)
    options = {**options, "reuse": options["reuse"] or reusable(tasks)}
    # What the agent failed in has counted: to play it until it goes well would be a better agent's rate.
    with open_run(options, tasks, rules, again=lambda failed: not failed.by_agent) as run:
        await play(run, agent, tasks, rules, options)
        return run, evaluated(run, tasks, threshold=options["threshold"], ks=options["ks"])


def _ordered(tasks: Taskset, options: Mapping[str, Any]) -> Taskset:
    tasks = tasks.shuffled(options["seed"]) if options["shuffle"] else tasks
    return tasks.head(options["limit"] or len(tasks))


def _show(found: Evaluation, run: Run, shown: Mapping[str, Any]) -> None:
    rows = {**report.summary(found), "seconds": f"{shown['wall']:.1f}"}
    show_record({**rows, "trajectories": run.folder / NAME, "page": run.folder / PAGE}, "table")
    missed = [result for result in found.results if found.passed_of(result) < len(result.valid)]
    missed.sort(key=lambda result: found.passed_of(result) / len(result.valid))
    if missed:
        click.echo()
        show_table(["missed", "passed", "scores"], [_missed(found, result) for result in missed[:LISTED]])
        if len(missed) > LISTED:
            say(f"and {len(missed) - LISTED} more, which the page shows")
    show_failures(run)
    if found.failed and found.counted:
        label("warning", f"{found.failed} episodes have no score, and count in no rate")
    if found.asked.agent == "oracle" and found.tally.errors:
        label("warning", f"calls of the solutions that ended in a tool error: {found.tally.errors}; the page has them")


def _missed(found: Evaluation, result: TaskResult) -> list[str]:
    scores = " ".join(f"{score:.3g}" for score in result.valid[:8])
    return [result.id[:60], f"{found.passed_of(result)} of {len(result.valid)}", scores]


# Two of them


@click.command()
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path))
@threshold_option
@output_option
def compare(*, before: Path, after: Path, threshold: float, output: str) -> None:
    """Compare two evaluations, task by task.

    BEFORE and AFTER are folders of runs. Tasks that both have a score for are compared with themselves, so that the
    difference is surer than that of two means; the interval has a confidence of 95 %. A task passes when more than
    half of its samples do.

    \b
    Example:
      aenv compare runs/first runs/second
      aenv compare runs/first runs/second -o json
    """
    first, second = (Evaluation.read(folder, threshold=threshold) for folder in (before, after))
    found = compare_both(first, second)
    if output == "json":
        runs = {"before": _about(first, before), "after": _about(second, after)}
        show_json({"runs": runs, **msgspec.to_builtins(found)})
        return
    _show_both(found, first, second)


def _about(of: Evaluation, folder: Path) -> dict[str, Any]:
    return {
        "run": str(folder),
        "env": of.env,
        "agent": of.asked.agent,
        "failed": of.failed,
        "agent_failed": of.agent_failed,
    }


def _show_both(found: Comparison, first: Evaluation, second: Evaluation) -> None:
    low, high = found.interval
    show_record(
        {
            "before": f"{first.env}, {first.asked.agent}: {found.before:.4f}",
            "after": f"{second.env}, {second.asked.agent}: {found.after:.4f}",
            "difference": f"{found.difference:+.4f} ({low:+.4f} to {high:+.4f})",
            "tasks": f"{found.tasks}, better: {found.better}, worse: {found.worse}",
        },
        "table",
    )
    for title, pairs in (("now passed", found.won), ("no longer passed", found.lost)):
        _show_pairs(title, pairs)
    if found.left_out:
        say(f"left out, without a score in one of the two: {len(found.left_out)}")
    if found.changed:
        label("warning", f"{len(found.changed)} tasks of one id do not say the same in both: {found.changed[0]}")


def _show_pairs(title: str, pairs: list[Pair]) -> None:
    if pairs:
        click.echo()
        rows = [[pair.id[:60], f"{pair.before:.4g}", f"{pair.after:.4g}"] for pair in pairs[:LISTED]]
        show_table([f"{title}: {len(pairs)}", "before", "after"], rows)
