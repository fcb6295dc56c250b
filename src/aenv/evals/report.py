"""An evaluation for people: rows for a terminal, and one page for a browser, with plots and every episode."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cache, partial
from html import escape
from pathlib import Path
from urllib.parse import quote

from aenv.evals import plots, statistics
from aenv.evals.results import Evaluation, TaskResult
from aenv.evals.statistics import Estimate
from aenv.rl.trajectory import Trajectory
from aenv.rl.viewing import html
from aenv.rl.viewing.text import line

_HEAD = (
    '<tr><th>task</th><th class="number">passed</th><th class="number">mean</th>'
    '<th class="number">seconds</th><th>episodes</th></tr>'
)
PHASES = ("create", "reset", "model", "tool", "agent", "reward", "release")


def summary(found: Evaluation) -> dict[str, str]:
    """What a person wants to know first, by name."""
    tally, taskset = found.tally, found.asked.settings.get("taskset", {})
    chosen = [f"{name}={value}" for name, value in taskset.get("selection", {}).items()]
    about = ", ".join(filter(None, (taskset.get("source", ""), *chosen)))
    rows = {
        "env": found.env,
        "agent": found.asked.agent,
        "tasks": f"{len(found.results)} ({about})" if about else str(len(found.results)),
        "episodes": f"{tally.episodes}, failed: {found.failed}",
        "passed": f"{found.passed} of {found.counted}",
        "score": told(found.score),
        "pass rate": told(found.pass_rate),
    }
    rows |= {f"pass@{k}": told(found.pass_at(k)) for k in found.ks}
    rows |= {f"pass^{k}": told(found.pass_all(k)) for k in found.ks}
    if found.agent_failed:
        rows["failed by the agent"] = f"{found.agent_failed} episodes, which count as not passed"
    if found.parts:
        rows["parts"] = ", ".join(f"{name} {mean:.4g}" for name, mean in found.parts.items())
    if found.not_judged:
        rows["not judged in full"] = f"{found.not_judged} episodes"
    rows["calls"] = f"{tally.calls} in {tally.turns} turns, tool errors: {tally.errors}"
    if tally.prompt_tokens or tally.completion_tokens:
        rows["tokens"] = f"{tally.prompt_tokens:,} read, {tally.completion_tokens:,} written"
    spent = {name: seconds for name, seconds in spent_in(tally.seconds).items() if seconds}
    rows["time of all"] = ", ".join(f"{name} {plots.shown(seconds)}" for name, seconds in spent.items())
    return {name: line(value) for name, value in rows.items()}


def told(estimate: Estimate | None) -> str:
    """An estimate in words."""
    if estimate is None:
        return "not known"
    left = f", tasks left out: {estimate.left_out}" if estimate.left_out else ""
    return f"{estimate.value:.4f} ({estimate.low:.4f} to {estimate.high:.4f}){left}"


def spent_in(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase; of the agent's, what was neither its model's nor a tool's."""
    found = {name: seconds.get(name, 0.0) for name in PHASES}
    found["agent"] = max(0.0, found["agent"] - found["model"] - found["tool"])
    return found


def page(found: Evaluation, trajectories: Iterable[Trajectory], *, title: str, most: int = 1000) -> str:
    """One page that loads nothing: numbers and plots, a table of tasks, and the first ``most`` episodes."""
    return html.page(trajectories, title=title, most=most, overview=partial(_overview, found), style=_style())


@cache
def _style() -> str:
    return (Path(__file__).parent / "report.css").read_text(encoding="utf-8")


def _overview(found: Evaluation, shown: Collection[str]) -> str:
    valid = [score for result in found.results for score in result.valid]
    facts = "".join(
        f'<div class="fact"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in _headline(found).items()
    )
    drawn = plots.histogram(valid, found.threshold)
    drawn += plots.phases(spent_in(found.tally.seconds))
    drawn += plots.rates([_rate(found, result, shown) for result in found.results if result.valid])
    rows = "".join(_row(found, result, shown) for result in found.results)
    about = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in summary(found).items())
    return (
        f'<div id="overview"><div class="facts">{facts}</div><div class="plots">{drawn}</div>'
        f"<details><summary>All numbers</summary><dl>{about}</dl></details>"
        f'<section><h3>Tasks</h3><table id="tasks">{_HEAD}{rows}</table></section></div>'
    )


def _headline(found: Evaluation) -> dict[str, str]:
    score, rate = found.score, found.pass_rate
    facts = {} if score is None else {f"score, {score.low:.3f} to {score.high:.3f}": f"{score.value:.3f}"}
    if rate is not None:
        facts[f"pass rate, {rate.low:.1%} to {rate.high:.1%}"] = f"{rate.value:.1%}"
    for k in found.ks:
        for name, estimate in ((f"pass@{k}", found.pass_at(k)), (f"pass^{k}", found.pass_all(k))):
            if k > 1 and estimate is not None:
                facts[name] = f"{estimate.value:.1%}"
    return facts | {"episodes passed": f"{found.passed} of {found.counted}"}


def _rate(found: Evaluation, result: TaskResult, shown: Collection[str]) -> plots.Rate:
    count, of = found.passed_of(result), len(result.valid)
    link = next((_address(id) for id in result.episodes if id in shown), "")
    return plots.Rate(line(result.id), count / of, statistics.wilson(count, of), link)


def _row(found: Evaluation, result: TaskResult, shown: Collection[str]) -> str:
    valid = result.valid
    mean = f"{sum(valid) / len(valid):.3g}" if valid else ""
    links = "".join(
        _link(found, id, score, id in shown) for id, score in zip(result.episodes, result.scores, strict=True)
    )
    passed = f"{found.passed_of(result)} of {len(valid)}"
    return (
        f'<tr><td>{escape(line(result.id))}</td><td class="number">{passed}</td><td class="number">{mean}</td>'
        f'<td class="number">{result.seconds:.2f}</td><td>{links}</td></tr>'
    )


def _link(found: Evaluation, id: str, score: float | None, is_shown: bool) -> str:
    kind = "bad" if score is None else "good" if found.is_pass(score) else "low"
    text = "failed" if score is None else f"{score:.3g}"
    return f'<a class="{kind}" href="{_address(id)}">{text}</a>' if is_shown else f"<span>{text}</span> "


def _address(id: str) -> str:
    return f"#{quote(id, safe='')}"
