"""What is counted, as Prometheus's own parser reads it, and a log that is JSON."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from aenv.errors import InvalidConfig
from aenv.web import logs, metrics
from aenv.web.metrics import Metrics
from tests.support import Reply
from tests.web.shop import Server
from tests.web.test_app import ask

parser = pytest.importorskip("prometheus_client.parser", reason="needs prometheus-client")
PATIENCE = 60.0


def read(text: str) -> dict[str, Any]:
    """Families by name."""
    return {family.name: family for family in parser.text_string_to_metric_families(text)}


def samples(family: Any) -> dict[tuple[str, ...], float]:
    return {(sample.name, *sample.labels.values()): sample.value for sample in family.samples}


def test_every_kind_is_understood() -> None:
    made = Metrics()
    counter = made.counter("a_total", "Counts.", ("how",))
    counter.add(("well",))
    counter.add(("well",), 2.5)
    counter.add(('od"d\\\n',))
    histogram = made.histogram("b_seconds", "Takes.", ("what",), (0.1, 1.0))
    for value in (0.1, 0.2, 5.0):
        histogram.observe(value, ("x",))
    made.gauge("c", "Is.", lambda: 0.25)
    made.gauge("d", "Are.", lambda: {("one",): 1, ("two",): 2**60}, ("which",))
    made.counted("e_total", "Elsewhere.", lambda: 7)
    found = read(made.text())
    assert samples(found["a"]) == {("a_total", "well"): 3.5, ("a_total", 'od"d\\\n'): 1}
    assert samples(found["b_seconds"]) == {
        ("b_seconds_bucket", "x", "0.1"): 1,
        ("b_seconds_bucket", "x", "1"): 2,
        ("b_seconds_bucket", "x", "+Inf"): 3,
        ("b_seconds_sum", "x"): 5.3,
        ("b_seconds_count", "x"): 3,
    }
    assert samples(found["c"]) == {("c",): 0.25}
    assert samples(found["d"]) == {("d", "one"): 1, ("d", "two"): 2**60}
    assert (found["e"].type, found["d"].type, found["b_seconds"].documentation) == ("counter", "gauge", "Takes.")


def test_series_are_bounded_whoever_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MOST_SERIES", 100)
    made = Metrics()
    counter, histogram = made.counter("a_total", "", ("x", "y")), made.histogram("b", "", ("x",), (1.0,))
    made.gauge("c", "", lambda: {(str(n),): n for n in range(1000)}, ("x",))
    for n in range(1000):
        counter.add((str(n), "y"))
        histogram.observe(n, (str(n),))
    found = read(made.text())
    assert len(found["a"].samples) == 101
    assert samples(found["a"])["a_total", "other", "other"] == 900
    assert len(found["b"].samples) <= 4 * 26
    assert samples(found["b"])["b_count", "other"] == 975
    assert len(found["c"].samples) == 100


def test_what_cannot_be_read_is_left_out_and_the_rest_is_shown() -> None:
    def fail() -> float:
        raise RuntimeError("gone")

    made = Metrics()
    made.gauge("a", "", fail)
    made.gauge("b", "", lambda: 1)
    assert {"b"} <= set(read(made.text())) - {"a"}


def test_endpoints_are_templates_and_never_what_was_asked_for(server: Server) -> None:
    ask(server, "GET", "/item/a-secret-name?token=t-secret")
    ask(server, "GET", "/nowhere/secret")
    ask(server, "DELETE", "/item/a", token="t-none")
    ask(server, "POST", "/fail/AEnvError", token="t-push")
    page = ask(server, "GET", "/metrics")
    assert page.headers["content-type"] == metrics.CONTENT_TYPE
    assert b"secret" not in page.body
    found = read(page.body.decode())
    counted = samples(found["aenv_api_requests"])
    assert counted["aenv_api_requests_total", "GET", "/item/{name}", "200"] == 1
    assert counted["aenv_api_requests_total", "-", "-", "404"] == 1
    assert counted["aenv_api_requests_total", "DELETE", "/item/{name}", "403"] == 1
    taken = samples(found["aenv_api_request_duration_ms"])
    assert taken["aenv_api_request_duration_ms_count", "GET", "/item/{name}", "200"] == 1


# The log as JSON


class Written:
    """Lines that were written, by way of a real pipe."""

    def __init__(self) -> None:
        self._read, self.write = os.pipe()
        self.text = b""
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while data := os.read(self._read, 65536):
            self.text += data

    def close(self) -> list[dict[str, Any]]:
        os.close(self.write)
        self._thread.join(PATIENCE)
        os.close(self._read)
        return [json.loads(line) for line in self.text.splitlines()]


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    found = logging.getLogger("aenv.of-this-test")
    found.propagate = False
    found.setLevel(logging.DEBUG)
    yield found
    found.handlers.clear()


def test_a_record_is_an_object_with_what_is_known_of_its_request(logger: logging.Logger) -> None:
    written = Written()
    lines = logs.Lines(written.write)
    logger.addHandler(logs.JsonHandler(lines))
    with logs.about(request_id="r1") as known:
        known["owner"] = "ann"
        with logs.about(instance="i1"):
            logger.info("made %s", "it", extra=logs.fields({"status": 200, "ms": 1.5}))
        try:
            raise ValueError("odd \ud800")
        except ValueError:
            about = ("failed\nbadly", (), sys.exc_info())
            # Straight to the handler: what captures logs for pytest cannot stand half a character.
            logger.handlers[-1].handle(logger.makeRecord(logger.name, logging.ERROR, __file__, 1, *about))
    logger.debug("x" * 100_000)
    assert lines.flush(PATIENCE)
    made, failed, long = written.close()
    assert made.pop("time").endswith("Z")
    assert made == {
        "level": "info",
        "logger": "aenv.of-this-test",
        "message": "made it",
        "request_id": "r1",
        "owner": "ann",
        "instance": "i1",
        "status": 200,
        "ms": 1.5,
    }
    assert (failed["message"], failed["level"], failed["request_id"]) == ("failed\nbadly", "error", "r1")
    assert "instance" not in failed
    assert "ValueError: odd ?" in failed["exception"]
    assert len(long["message"]) == logs.LONGEST
    assert "request_id" not in long
    assert (lines.written, lines.dropped) == (3, 0)


def test_a_reader_that_does_not_read_costs_lines_and_no_time() -> None:
    reading, writing = os.pipe()
    lines = logs.Lines(writing, most=300_000)
    for _ in range(1000):
        lines.write(b"x" * 1000)
    assert lines.dropped > 500
    assert not lines.flush(0.2)
    dropped = lines.dropped
    got = b""
    while len(got) < (1000 - dropped) * 1000:
        got += os.read(reading, 65536)
    assert lines.flush(PATIENCE)
    assert lines.written == 1000 - dropped
    os.close(reading)
    lines.write(b"to nobody")
    deadline = time.monotonic() + PATIENCE
    while lines.dropped == dropped and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lines.dropped == dropped + 1
    os.close(writing)


def test_time_is_told_in_utc() -> None:
    assert logs.timestamp(0.0) == "1970-01-01T00:00:00.000Z"
    assert logs.timestamp(1700000000.9996) == "2023-11-14T22:13:20.999Z"


def test_an_unknown_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENV_LOG_FORMAT", "jsno")
    with pytest.raises(InvalidConfig, match="jsno") as refused:
        logs.configure(None, level=logging.INFO)
    assert "json" in str(refused.value.hint)


def test_lines_of_a_process_that_ends_are_all_there() -> None:
    program = """
import logging
from aenv.web import logs
logs.configure("json", level=logging.INFO)
logging.getLogger("aenv.x").info("first")
assert logs.lines() is not None
logs.lines().write(b'{"message": "last"}\\n')
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert [json.loads(line)["message"] for line in done.stderr.splitlines()] == ["first", "last"], done.stderr


def test_a_request_is_one_line_without_what_it_carried(server: Server) -> None:
    written = Written()
    lines = logs.Lines(written.write)
    handler = logs.JsonHandler(lines)
    web = logging.getLogger("aenv.web")
    level = web.level
    web.addHandler(handler)
    web.setLevel(logging.INFO)
    try:
        trace = "0af7651916cd43dd8448eb211c80319c"
        reply: Reply = ask(
            *(server, "GET", "/item/a?token=hidden"),
            **{"X-Request-Id": "r-1", "traceparent": f"00-{trace}-b7ad6b7169203331-01", "X-Secret": "hidden"},
        )
        assert reply.status in (200, 400)
        ask(server, "GET", "/item/b", token="hidden")
    finally:
        web.removeHandler(handler)
        web.setLevel(level)
    assert lines.flush(PATIENCE)
    first, second = written.close()
    assert (first["method"], first["endpoint"], first["status"]) == ("GET", "/item/{name}", reply.status)
    assert (first["request_id"], first["owner"], first["trace_id"]) == ("r-1", "ann", trace)
    assert first["ms"] >= 0
    assert (second["status"], second["error"], second["target"]) == (401, "unauthorized", "b")
    assert b"hidden" not in written.text
