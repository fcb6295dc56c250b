"""Spans, their contexts, and their way to a collector."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv import config, tracing
from aenv.errors import Invalid, InvalidConfig
from aenv.tracing import Tracer, parse_timing
from tests.collector import Collector, attributes, collector
from tests.store.servers import free_port

PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


@pytest.fixture
def collected() -> Iterator[Collector]:
    with collector() as found:
        yield found


def test_a_span_is_what_opentelemetry_wants(collected: Collector) -> None:
    tracer = Tracer(collected.url + "/", headers={"X-Scope": "a b"}, service="here")
    span = tracer.begin("call", PARENT, kind="server")
    assert span.sampled
    assert span.trace_id == PARENT[3:35].decode()
    assert span.traceparent[:36] == PARENT[:36]
    assert span.traceparent[36:52] != PARENT[36:52]
    assert span.traceparent.endswith(b"-01")
    for name, value in {"text": "ä\ud800", "whole": 2**40, "half": 0.5, "yes": True, "long": "x" * 1000}.items():
        span.set(name, value)
    span.child("part", span.began, span.began + 0.25, size=3)
    span.end(error="Odd")
    span.end()
    assert tracer.flush(30)
    found = collected.wait("call", "part")
    call, part = found["call"], found["part"]
    assert len(collected.spans) == 2
    assert call.trace_id.hex() == part.trace_id.hex() == PARENT[3:35].decode()
    assert call.parent_span_id.hex() == PARENT[36:52].decode()
    assert part.parent_span_id == call.span_id == bytes.fromhex(span.traceparent[36:52].decode())
    assert (call.kind, part.kind) == (2, 1)
    assert (call.status.code, call.status.message, part.status.code) == (2, "Odd", 0)
    assert attributes(call) == {"text": "ä?", "whole": 2**40, "half": 0.5, "yes": True, "long": "x" * tracing.LONGEST}
    assert attributes(part) == {"size": 3}
    assert abs(part.end_time_unix_nano - part.start_time_unix_nano - 250_000_000) < 1000
    assert call.start_time_unix_nano <= call.end_time_unix_nano <= time.time_ns()
    assert collected.resources[0]["service.name"] == "here"
    assert collected.headers[0]["x-scope"] == "a b"
    assert (tracer.sent, tracer.dropped) == (2, 0)


def test_who_is_not_sampled_passes_its_parent_on_and_sends_nothing() -> None:
    tracer = Tracer("http://127.0.0.1:1")
    span = tracer.begin("call", UNSAMPLED.decode())
    span.set("a", 1)
    span.child("b", 1, 2)
    span.inside(b"queue;dur=1, tool;dur=2", 1, 2)
    with span:
        assert tracing.inherited() == UNSAMPLED
    assert span.traceparent == UNSAMPLED
    assert not span.sampled
    assert tracer.flush(0)


@pytest.mark.parametrize(
    "parent",
    [
        None,
        b"",
        "nonsense",
        "ä",
        b"00-" + b"0" * 32 + b"-b7ad6b7169203331-01",
        b"00-0af7651916cd43dd8448eb211c80319c-" + b"0" * 16 + b"-01",
        b"ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        PARENT.upper(),
        PARENT + b"\r\nX: y",
    ],
)
def test_what_is_no_parent_begins_a_trace(parent: str | bytes | None) -> None:
    span = Tracer("http://127.0.0.1:1").begin("call", parent)
    assert span.sampled
    assert tracing.trace_id(span.traceparent) == span.trace_id != "0af7651916cd43dd8448eb211c80319c"


def test_a_share_of_the_traces_that_begin_here_is_kept() -> None:
    none, half = Tracer("http://127.0.0.1:1", ratio=0), Tracer("http://127.0.0.1:1", ratio=0.5)
    assert not any(none.begin("x").sampled for _ in range(50))
    assert none.begin("x", PARENT).sampled
    left = half.begin("x")
    while left.sampled:
        left = half.begin("x")
    assert left.traceparent.endswith(b"-00")
    assert not half.begin("y", left.traceparent).sampled
    assert 100 < sum(half.begin("x").sampled for _ in range(1000)) < 900


def test_a_blocks_span_is_the_parent_of_what_is_in_it() -> None:
    tracer = Tracer("http://127.0.0.1:1")
    assert tracing.inherited() == b""
    outer = tracer.begin("outer")
    with outer:
        assert tracing.inherited() == outer.traceparent
    assert tracing.inherited() == b""
    assert not outer.sampled  # it has ended


def test_a_sandboxes_timing_is_laid_between_the_way_there_and_the_way_back(collected: Collector) -> None:
    tracer = Tracer(collected.url)
    span = tracer.begin("call")
    span.inside(b"queue;dur=100, tool;dur=200.5", 1000.0, 1000.4)
    span.end()
    for odd in (b"db;dur=5", b""):
        span = tracer.begin("odd")
        span.inside(odd, 1000.0, 1000.4)
        span.end()
    found = collected.wait("call", "queue", "tool", "odd")
    assert tracer.flush(30)
    assert len(collected.spans) == tracer.sent == 5
    nano = 10**9
    assert abs(found["queue"].start_time_unix_nano - 1000.04975 * nano) < 1000
    assert found["queue"].end_time_unix_nano == found["tool"].start_time_unix_nano
    assert abs(found["tool"].end_time_unix_nano - 1000.35025 * nano) < 1000


@given(st.binary(max_size=400))
@settings(max_examples=200, deadline=None)
def test_no_timing_of_a_sandbox_is_too_odd(value: bytes) -> None:
    found = parse_timing(value)
    assert found is None or all(0 <= number < 10**10 for number in found)


def test_timing_is_read() -> None:
    assert parse_timing(b"queue;dur=0.125, tool;dur=12.5") == (0.125, 12.5)
    for odd in (b"", b"tool;dur=1", b"db;dur=1, tool;dur=2", b"queue;dur=1"):
        assert parse_timing(odd) is None
    for odd in (b"-1", b"nan", b"inf", b"1e300", b"x", b""):
        assert parse_timing(b"queue;dur=1, tool;dur=" + odd) is None
        assert parse_timing(b"queue;dur=" + odd + b", tool;dur=1") is None


# The way to the collector


def test_a_collector_that_is_busy_is_asked_again(collected: Collector) -> None:
    collected.answers = [(503, b""), (429, b"")]
    tracer = Tracer(collected.url)
    tracer.begin("call").end()
    collected.wait("call")
    assert tracer.flush(30)
    assert (tracer.sent, tracer.dropped, collected.requests) == (1, 0, 3)


def test_what_a_collector_refuses_is_counted(collected: Collector) -> None:
    collected.answers = [(400, b"")]
    tracer = Tracer(collected.url)
    tracer.begin("call").end()
    assert tracer.flush(30)
    assert (tracer.sent, tracer.dropped, collected.requests) == (0, 1, 1)
    assert tracing._rejected(b'{"partialSuccess":{"rejectedSpans":"2"}}', 3) == 2
    assert tracing._rejected(b'{"partialSuccess":{"rejectedSpans":"9"}}', 3) == 3
    assert tracing._rejected(b"nonsense", 3) == tracing._rejected(b"[]", 3) == tracing._rejected(b"{}", 3) == 0


def test_a_collector_that_is_gone_costs_spans_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MOST_WAITING", 10)
    tracer = Tracer(f"http://127.0.0.1:{free_port()}")
    for _ in range(100):
        tracer.begin("call").end()
    assert tracer.flush(30)
    assert (tracer.sent, tracer.dropped) == (0, 100)


def test_spans_of_many_threads_all_arrive(collected: Collector) -> None:
    tracer = Tracer(collected.url)

    def work() -> None:
        for _ in range(200):
            tracer.begin("call").end()

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tracer.flush(30)
    assert (tracer.sent, tracer.dropped, len(collected.spans)) == (1000, 0, 1000)


def test_a_forked_child_sends_its_own_and_not_its_parents(collected: Collector) -> None:
    program = """
import os, sys
from aenv.tracing import Tracer
tracer = Tracer(sys.argv[1])
tracer.begin("parent").end()
child = os.fork()
if not child:
    tracer.begin("child").end()
    os._exit(0 if tracer.flush(30) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", program, collected.url], timeout=60, check=False)
    assert done.returncode == 0
    collected.wait("parent", "child")
    assert sorted(span.name for span in collected.spans) == ["child", "parent"]
    assert {pid for resource in collected.resources for pid in [resource["process.pid"]]} - {os.getpid()}


# Settings


def configured_elsewhere(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "AENV_TRACES"))}
    code = f"from aenv import tracing\ntracer = tracing.configured()\n{program}"
    return subprocess.run(
        [sys.executable, "-c", code], env=kept | variables, capture_output=True, text=True, timeout=60, check=False
    )


def test_tracing_is_off_unless_it_is_asked_for() -> None:
    done = configured_elsewhere("print(tracer, 'http.client' in __import__('sys').modules)")
    assert done.stdout == "None False\n", done.stderr


def test_opentelemetrys_own_variables_are_understood(collected: Collector) -> None:
    done = configured_elsewhere(
        "tracer.begin('call').end()",  # and sent while the interpreter ends
        OTEL_EXPORTER_OTLP_ENDPOINT=collected.url.replace("127.0.0.1", "localhost"),
        OTEL_EXPORTER_OTLP_HEADERS="x-a=1, X-B=two%20words",
        OTEL_SERVICE_NAME="trainer",
        OTEL_TRACES_SAMPLER_ARG="1",
    )
    assert done.returncode == 0, done.stderr
    collected.wait("call")
    assert collected.resources[0]["service.name"] == "trainer"
    assert (collected.headers[0]["x-a"], collected.headers[0]["x-b"]) == ("1", "two words")


def test_a_process_ends_though_its_collector_does_not_answer() -> None:
    done = configured_elsewhere(
        "tracer.begin('call').end(); print('done')", AENV_TRACES=f"http://127.0.0.1:{free_port()}"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_settings_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Invalid, match="not an address"):
        Tracer("localhost:4318")
    for text in ("a", "a=b,c", "=b", "a b=c"):
        with pytest.raises(InvalidConfig, match="name=value"):
            tracing._pairs(text)
    with pytest.raises(InvalidConfig) as refused:
        tracing._pairs("x=secret\nvalue")
    assert "secret" not in str(refused.value)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "half")
    with pytest.raises(InvalidConfig, match="OTEL_TRACES_SAMPLER_ARG"):
        config.get("otel_sampler_arg")


def test_variables_that_others_read_too_stay_visible_in_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "an-author's")
    monkeypatch.setenv("AENV_TRACES", "http://127.0.0.1:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=secret")
    assert config.environment()["OTEL_SERVICE_NAME"] == "an-author's"
    assert "AENV_TRACES" not in config.environment()
    assert not {"OTEL_SERVICE_NAME", "OTEL_EXPORTER_OTLP_HEADERS"} & set(config.child_environment({}))


# An application's own OpenTelemetry


def test_the_applications_own_span_is_inherited() -> None:
    trace = pytest.importorskip("opentelemetry.trace", reason="needs opentelemetry-api")
    context = trace.SpanContext(0xAF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, False, trace.TraceFlags(1))
    assert tracing.inherited() == b""
    with trace.use_span(trace.NonRecordingSpan(context)):
        assert tracing.inherited() == PARENT
    assert tracing.inherited() == b""
