"""A platform that is watched: metrics, a log in JSON, traces from the SDK to the tool, and files that build on them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from tests.collector import Collector, attributes, collector
from tests.platform.support import PATIENCE, Platform, ask, eventually, platform

pytestmark = pytest.mark.xdist_group("observability")  # one platform for all of them
ROOT = Path(__file__).parent.parent.parent
FILES = ROOT / "deploy" / "observability"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
HUSH = "an-argument-that-nobody-may-read"
SDK = """
import asyncio, sys
from contextlib import nullcontext
from aenv import Environment
from aenv.models import Sandbox

async def main(command, url, token):
    through = None if not url else lambda spec: nullcontext(Sandbox(url=url, public_url=url, id="known", token=token))
    async with Environment("mini-terminal", provision=through) as env:
        result = await env.call_tool("execute_command", {"command": command})
        print(env.instance_id, result.text, (await env.history())[-1]["tool"] > 0)

asyncio.run(main(*sys.argv[1:]))
"""


class Watched(NamedTuple):
    platform: Platform
    collector: Collector
    instance: dict[str, Any]


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    with ExitStack() as stack:
        found = stack.enter_context(collector())
        served = stack.enter_context(platform("--log-format", "json", AENV_TRACES=found.url))
        yield Watched(served, found, served.create("mini-terminal"))


def call(watched: Watched, **headers: str) -> Any:
    """A tool call through the gateway."""
    body = {"command": f"echo {HUSH}", "timeout": 30}
    return watched.platform.call(
        watched.instance["id"], "POST", "/tools/execute_command", body, headers={"X-Request-Id": "r-call", **headers}
    )


def lines(watched: Watched, **fields: Any) -> list[dict[str, Any]]:
    """Lines of the log with these fields, once there is one."""

    def look() -> list[dict[str, Any]]:
        found = [json.loads(line) for line in list(watched.platform.log)]
        return [line for line in found if fields.items() <= line.items()]

    return eventually(f"a line with {fields}", look)


# Traces


def test_a_call_is_traced_from_the_sdk_through_the_gateway_to_the_tool(watched: Watched) -> None:
    served, instance = watched.platform, watched.instance
    sent = len(watched.collector.spans)
    printed = served.run(
        *(SDK, f"echo {HUSH}", instance["url"], instance["owner_token"]),
        OTEL_EXPORTER_OTLP_ENDPOINT=watched.collector.url,
        OTEL_SERVICE_NAME="trainer",
    )
    assert "True" in printed

    def look() -> list[Any]:
        """The call, and what came of it, each the parent of the next."""
        spans = watched.collector.spans[sent:]
        chain = [span for span in spans if span.name == "tool execute_command"]
        for name in ("gateway", "tool"):
            last = chain[-1].span_id if chain else None
            chain += [span for span in spans if span.name == name and span.parent_span_id == last]
        return chain if len(chain) == 3 else []

    call, gateway, tool = eventually("spans of all three", look)
    assert call.trace_id == gateway.trace_id == tool.trace_id
    assert (call.kind, gateway.kind) == (3, 2)
    assert attributes(gateway)["aenv.instance"] == instance["id"]
    assert attributes(call)["aenv.env"] == "mini-terminal"
    assert call.start_time_unix_nano <= tool.start_time_unix_nano <= tool.end_time_unix_nano <= call.end_time_unix_nano
    assert "trainer" in {resource["service.name"] for resource in watched.collector.resources}
    assert not watched.collector.faults


def test_a_start_is_traced_with_its_phases_and_a_direct_call_with_its_tool(watched: Watched) -> None:
    sent = len(watched.collector.spans)
    printed = watched.platform.run(SDK, "true", "", "", AENV_TRACES=watched.collector.url)
    id = printed.split()[0]

    def look() -> list[Any]:
        found = watched.collector.spans[sent:]
        started = any(attributes(span).get("aenv.instance") == id and span.name.startswith("start") for span in found)
        return found if started and {"initialize", "tool execute_command"} <= {span.name for span in found} else []

    found = eventually("spans of the start", look)
    [initialize] = [span for span in found if span.name == "initialize"]
    [create] = [span for span in found if span.parent_span_id == initialize.span_id and span.name.startswith("POST")]
    [start] = [span for span in found if span.parent_span_id == create.span_id]
    phases = {span.name: span for span in found if span.parent_span_id == start.span_id}
    assert {"package", "engine", "engine.health"} <= set(phases)
    assert (create.name, start.name) == ("POST /env-instance", "start mini-terminal")
    assert attributes(start)["aenv.instance"] == id
    engine, health = phases["engine"], phases["engine.health"]
    assert engine.start_time_unix_nano <= health.start_time_unix_nano
    assert health.end_time_unix_nano <= engine.end_time_unix_nano
    [called] = [span for span in found if span.name == "tool execute_command"]
    assert "tool" in {span.name for span in found if span.parent_span_id == called.span_id}


def test_an_applications_own_trace_goes_through_though_only_the_platform_has_a_collector(watched: Watched) -> None:
    pytest.importorskip("opentelemetry.trace", reason="needs opentelemetry-api")
    program = f"""
from opentelemetry import trace
context = trace.SpanContext(0x{TRACE}, 0xb7ad6b7169203331, False, trace.TraceFlags(1))
own = trace.use_span(trace.NonRecordingSpan(context))
own.__enter__()
{SDK}"""
    instance = watched.instance
    watched.platform.run(program, "true", instance["url"], instance["owner_token"], AENV_TRACES="")

    def look() -> Any:
        return [span for span in watched.collector.spans if span.name == "gateway" and span.trace_id.hex() == TRACE]

    [found, *_] = eventually("the gateway's span", look)
    assert found.parent_span_id.hex() == "b7ad6b7169203331"


def test_probes_begin_no_trace_and_nothing_unsampled_is_sent(watched: Watched) -> None:
    watched.platform.ask("GET", "/metrics")
    watched.platform.ask("GET", "/health")
    watched.platform.ask("GET", "/audit", headers={"traceparent": PARENT[:-2] + "00"})
    watched.platform.ask("GET", "/secret", headers={"traceparent": PARENT})
    eventually("the last", lambda: [span for span in watched.collector.spans if span.name == "GET /secret"])
    assert not {"GET /metrics", "GET /health", "GET /audit"} & {span.name for span in watched.collector.spans}


# The log


def test_every_call_is_a_line_with_who_and_what_and_without_what_it_said(watched: Watched) -> None:
    served, instance = watched.platform, watched.instance
    assert HUSH in str(call(watched, traceparent=PARENT).data)
    [line, *_] = lines(watched, logger="aenv.gateway", request_id="r-call", trace_id=TRACE)
    assert (line["method"], line["endpoint"], line["status"]) == ("POST", "/tools/{name}", 200)
    assert (line["instance"], line["owner"]) == (instance["id"], instance["owner"])
    assert 0 < line["sandbox_ms"] <= line["ms"]
    served.ask("GET", f"/env-instance/{instance['id']}", headers={"X-Request-Id": "r-get"})
    [line] = lines(watched, logger="aenv.web", request_id="r-get")
    assert (line["endpoint"], line["instance"], line["status"]) == ("/env-instance/{id}", instance["id"], 200)
    served.ask("POST", "/env-instance", {"envName": "no-such-env"}, headers={"X-Request-Id": "r-none"})
    [line] = lines(watched, logger="aenv.web", request_id="r-none")
    assert (line["status"], line["error"]) == (404, "not_found")
    ask(served.data, "GET", f"/env-instance/{instance['id']}/mcp?token=of-nobody", headers={"X-Request-Id": "r-401"})
    [line] = lines(watched, logger="aenv.gateway", request_id="r-401")
    assert line["status"] == 401
    for hidden in (HUSH, served.token, instance["owner_token"], instance["agent_token"], "of-nobody"):
        assert hidden not in served.text


def test_a_server_whose_log_nobody_reads_goes_on(tmp_path: Path) -> None:
    variables = Platform(tmp_path).environment
    command = [sys.executable, "-m", "aenv", "serve", "hub", "--log-format", "json", "-o", "json", "--port", "0"]
    process = subprocess.Popen(
        command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
    )
    watchdog = threading.Timer(2 * PATIENCE, process.kill)
    watchdog.start()
    try:
        assert process.stdout is not None
        told = b""
        while not told.endswith(b"}\n") and (line := process.stdout.readline()):
            told += line
        url = json.loads(told)["url"]
        connection = HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
        for _ in range(500):  # a pipe holds less than that
            connection.request("GET", "/health")
            assert connection.getresponse().read()
        connection.close()
        process.terminate()
        assert process.wait(PATIENCE) == 0
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


# Metrics


def metrics(watched: Watched, token: str = "") -> dict[str, Any]:
    """Families by name, as Prometheus's own parser reads them."""
    parser = pytest.importorskip("prometheus_client.parser", reason="needs prometheus-client")
    page = watched.platform.ask("GET", "/metrics", token=token)
    assert page.status == 200
    assert page.headers["content-type"] == "text/plain; version=0.0.4"
    return {family.name: family for family in parser.text_string_to_metric_families(page.body.decode())}


def sample(families: dict[str, Any], name: str, **labels: str) -> float:
    family = next(found for known, found in families.items() if name.startswith(known))
    return sum(one.value for one in family.samples if one.name == name and labels.items() <= one.labels.items())


def test_calls_operations_and_starts_are_counted(watched: Watched) -> None:
    served, instance = watched.platform, watched.instance
    before = metrics(watched)
    call(watched)
    served.ask("POST", f"/env-instance/{instance['id']}/extend", {"ttl": "1h"})
    served.ask("POST", "/env-instance/no-such-instance/extend", {"ttl": "1h"})
    served.call(instance["id"], "GET", f"/{HUSH}")
    after = metrics(watched)

    def more(name: str, **labels: str) -> float:
        return sample(after, name, **labels) - sample(before, name, **labels)

    called = {"method": "POST", "endpoint": "/tools/{name}"}
    assert more("aenv_api_mcp_requests_total", **called, status="200") == 1
    assert more("aenv_api_mcp_requests_total", method="GET", endpoint="other", status="404") == 1
    assert more("aenv_api_mcp_request_duration_ms_count", endpoint="/tools/{name}") == 1
    for part in ("gateway", "queue", "tool"):
        assert more("aenv_api_mcp_part_duration_ms_count", endpoint="/tools/{name}", part=part) == 1
    assert more("aenv_api_instance_operations_total", operation="extend", status="ok") == 1
    assert more("aenv_api_instance_operations_total", operation="extend", status="not_found") == 1
    assert more("aenv_api_requests_total", endpoint="/env-instance/{id}/extend") == 2
    assert sample(after, "aenv_api_starts_total", status="running") >= 1
    assert sample(after, "aenv_api_create_seconds_count") >= 1
    assert sample(after, "aenv_api_create_phase_seconds_count", phase="engine") >= 1
    assert sample(after, "aenv_api_active_instances", env="mini-terminal", status="Running", kind="instance") >= 1
    assert sample(after, "aenv_api_store_up") == 1
    for name in ("process_cpu_seconds_total", "process_resident_memory_bytes", "process_start_time_seconds"):
        assert sample(after, name) > 0
    eventually(
        "the use of the platform", lambda: sample(metrics(watched), "aenv_api_platform_use", resource="instances")
    )
    eventually("the event loop", lambda: sample(metrics(watched), "aenv_api_event_loop_lag_ms_count"))
    page = served.ask("GET", "/metrics").body.decode()
    for hidden in (HUSH, instance["id"], served.token):
        assert hidden not in page


def test_a_scraper_needs_a_token_for_reading_and_no_more(watched: Watched) -> None:
    made = watched.platform.ask("POST", "/token", {"owner": "prometheus", "scopes": ["read"]}).data
    assert "aenv_api_requests" in metrics(watched, made["token"])
    assert watched.platform.ask("GET", "/metrics", token=None).status == 401


# Where the time of a start went


def test_a_start_tells_where_its_time_went(watched: Watched) -> None:
    served, id = watched.platform, watched.instance["id"]
    shown = served.aenv("instance", "get", id).stdout
    assert re.search(r"start\s.*\d s engine \(.*import", shown), shown
    found = json.loads(served.aenv("instance", "get", id, "-o", "json").stdout)
    assert found["phases"]["engine"] >= found["phases"]["engine.health"] > 0
    [last] = served.ask("GET", f"/env-instance/{id}/history?last=1").data if call(watched).status == 200 else [{}]
    assert 0 < last["tool"] <= last["seconds"]
    assert last["queue"] >= 0


# What builds on the metrics


_FUNCTIONS = {"sum", "rate", "max", "min", "by", "histogram_quantile", "topk", "absent", "increase", "and", "on"}
_WORDS = _FUNCTIONS | {"ignoring", "group_left", "le", "bool", "or", "unless"}
_OWN = {"up"}
"""What Prometheus itself makes."""


def names(expression: str) -> set[str]:
    """The metrics that an expression of PromQL asks for."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|ignoring|on|group_left)\s*\([^)]*\)", " ", expression)
    return {word for word in re.findall(r"[a-zA-Z_:][a-zA-Z0-9_:]*", bare) if word not in _WORDS}


def labels(expression: str) -> list[tuple[str, set[str]]]:
    """The metrics of an expression with the labels that they are chosen by."""
    found = re.findall(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{([^}]*)\}", expression)
    return [(name, set(re.findall(r"([a-z_]+)\s*[=!]", chosen)) - {"job", "instance"}) for name, chosen in found]


def check(expressions: list[str], families: dict[str, Any]) -> None:
    known: dict[str, set[str]] = {}
    for family in families.values():
        known[family.name if family.type != "counter" else f"{family.name}_total"] = set()
        if family.type == "histogram":
            known |= {f"{family.name}_{end}": set() for end in ("bucket", "sum", "count")}
        for one in family.samples:
            known.setdefault(one.name, set()).update(one.labels)
    for expression in expressions:
        assert names(expression) <= set(known) | _OWN, f"{expression} asks for what is not there"
        for name, chosen in labels(expression):
            assert chosen <= known.get(name, set()) or not known.get(name), f"{expression} chooses by {chosen}"


def test_the_dashboard_asks_for_what_is_there(watched: Watched) -> None:
    call(watched)
    dashboard = json.loads((FILES / "dashboard.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    assert {panel["type"] for panel in panels} <= {"timeseries", "stat"}
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(expressions) > 20
    check(expressions, metrics(watched))
    for first in panels:
        place = first["gridPos"]
        assert place["x"] + place["w"] <= 24


def test_the_alerts_ask_for_what_is_there(watched: Watched) -> None:
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    call(watched)
    [group] = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]
    rules = group["rules"]
    assert {rule["labels"]["severity"] for rule in rules} == {"page", "ticket"}
    for rule in rules:
        assert re.fullmatch(r"AEnv[A-Za-z]+", rule["alert"])
        assert re.fullmatch(r"\d+m", rule["for"])
        assert {"summary", "description"} <= set(rule["annotations"])
    check([rule["expr"] for rule in rules], metrics(watched))
