"""What a service counts, in the text format of Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from aenv.web.routes import Route

Gauges = Callable[[], Mapping[str, float]]
"""What else there is to show, by name, such as the instances that run."""


class Metrics:
    """Answers by route and status, and the gauges of whoever serves."""

    def __init__(self, gauges: Gauges | None = None) -> None:
        self._gauges = gauges
        self._answers: Counter[tuple[str, str, int]] = Counter()

    def answered(self, route: Route, status: int) -> None:
        self._answers[route.method or "-", route.path or "-", status] += 1

    def text(self) -> str:
        lines = ["# TYPE aenv_http_answers_total counter"]
        for (method, path, status), count in sorted(self._answers.items()):
            lines.append(f'aenv_http_answers_total{{method="{method}",route="{path}",status="{status}"}} {count}')
        for name, value in sorted((self._gauges() if self._gauges is not None else {}).items()):
            lines += [f"# TYPE aenv_{name} gauge", f"aenv_{name} {value:g}"]
        return "\n".join([*lines, ""])
