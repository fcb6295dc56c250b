"""A sandbox's life: starting, failing to start, reloading, ending."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.runtime.wire import Session, lines, send, send_raw
from tests.support import FIXTURES, sandbox


def project(tmp_path: Path, **files: str) -> Path:
    for name, text in files.items():
        path = tmp_path / "src" / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def start(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Start a runtime that is expected to end by itself."""
    command = [sys.executable, "-m", "aenv.runtime", str(path), "--port", "0", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


TOOL = "from aenv import register_tool\n\n@register_tool\ndef {name}() -> str:\n    return '{answer}'\n"


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"a": "import nothing_of_that_name"},
            ["a failed to import", "line 1", "No module named 'nothing_of_that_name'"],
        ),
        ({"a": "1/0"}, ["ZeroDivisionError", "line 1"]),
        ({"a": "def x(:"}, ["SyntaxError", "a.py"]),
        ({"a": "import sys; sys.exit(4)"}, ["SystemExit: 4"]),
        ({"a": "x = 1"}, ["nothing is registered", "hint: decorate a function"]),
        (
            {"a": TOOL.format(name="twin", answer=1), "b": TOOL.format(name="twin", answer=2)},
            ["tool 'twin' is registered twice", "a.py:3", "b.py:3"],
        ),
        (
            {"a": "from aenv import register_tool\n@register_tool\ndef f(x: object()) -> str: ...\n"},
            ["f()"],
        ),
        (
            {"a": TOOL.format(name="t", answer=1) + "from aenv import register_setup\n@register_setup\ndef s(): 1/0\n"},
            ["setup s() raised ZeroDivisionError"],
        ),
    ],
)
def test_a_project_that_cannot_start_says_why(tmp_path: Path, files: dict[str, str], words: list[str]) -> None:
    ended = start(project(tmp_path, **files))
    assert ended.returncode == 1
    for word in words:
        assert word in ended.stderr
    assert "importlib" not in ended.stderr
    assert "error: " in ended.stderr


def test_a_wrong_type_in_the_config_names_field_and_line(tmp_path: Path) -> None:
    project(tmp_path, a=TOOL.format(name="t", answer=1))
    (tmp_path / "config.json").write_text('{\n  "name": "x",\n  "version": 3\n}\n')
    ended = start(tmp_path)
    assert ended.returncode == 1
    assert "config.json:3" in ended.stderr
    assert "version" in ended.stderr


def test_a_port_in_use_is_named_with_a_way_out(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = start(project(tmp_path, a=TOOL.format(name="t", answer=1)), "--port", str(taken.getsockname()[1]))
    assert ended.returncode == 1
    assert "in use" in ended.stderr
    assert "--port" in ended.stderr


def test_calls_in_flight_finish_within_the_grace_time() -> None:
    with sandbox(FIXTURES / "lab") as running:
        sock = send_raw(running.port, "POST", "/tools/slow_count", {"seconds": 1.0}, {})
        send(running.port, "GET", "/health")
        assert running.stop() == 0
        with sock:
            assert "200" in next(lines(sock))


def test_a_call_that_outlives_the_grace_time_is_ended(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    with sandbox(FIXTURES / "lab", variables={"AENV_GRACE": "0.2", "TEARDOWN_FILE": str(marker)}) as running:
        socks = [send_raw(running.port, "POST", f"/tools/{name}", body, {}) for name, body in _ENDLESS]
        send(running.port, "GET", "/health")
        assert running.stop() == 0
        for sock in socks:
            with sock:
                assert "sandbox_lost" in "".join(lines(sock))
    assert marker.read_text() == "torn down"


_ENDLESS = (("sleep", {"seconds": 600}), ("hang", {}))


def test_a_call_limit_is_the_platforms_failure(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "lab", tmp_path / "lab", ignore=shutil.ignore_patterns("__pycache__"))
    config = json.loads((tmp_path / "lab" / "config.json").read_text())
    config["deployConfig"]["timeouts"] = {"call": "1s"}
    (tmp_path / "lab" / "config.json").write_text(json.dumps(config))
    with sandbox(tmp_path / "lab") as running:
        reply = send(running.port, "POST", "/tools/sleep", {"seconds": 60})
        assert (reply.status, reply.json["code"]) == (504, "call_timeout")
        session = Session(running.port)
        error = session.request("tools/call", {"name": "hang", "arguments": {}}).json["error"]
        assert error["data"]["aenv"]["code"] == "call_timeout"
        assert send(running.port, "GET", "/info").json["data"]["timeouts"] == {"call": 1.0}


def test_reload_tells_listeners_and_keeps_the_last_good_version(tmp_path: Path) -> None:
    path = project(tmp_path, a=TOOL.format(name="first", answer="one"))
    code = (
        "from pathlib import Path; import logging, sys; from aenv.runtime.server import run;"
        "logging.basicConfig(level=20);"
        f"run(Path({str(path)!r}), port=0, reload=True,"
        " on_ready=lambda s: print('serving 1 tools at ' + s.url + '/mcp', file=sys.stderr, flush=True))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        url = next(line for line in process.stderr if "serving" in line).split()[-1]
        port = int(url.removesuffix("/mcp").rpartition(":")[2])
        session = Session(port)
        stream = send_raw(port, "GET", "/mcp", None, {**session.headers, "Accept": "text/event-stream"})
        heard = lines(stream)
        while not next(heard).startswith("id:"):
            continue
        (path / "src" / "a.py").write_text("1/0")
        assert any("reload failed" in line for line in process.stderr)
        assert send(port, "POST", "/tools/first", {}).json["data"] == "one"
        (path / "src" / "a.py").write_text(TOOL.format(name="second", answer="two"))
        assert any("tools/list_changed" in line for line in heard)
        assert send(port, "POST", "/tools/second", {}).json["data"] == "two"
        assert send(port, "POST", "/tools/first", {}).status == 404
        assert [tool["name"] for tool in session.request("tools/list").json["result"]["tools"]] == ["second"]
        stream.close()
    finally:
        process.terminate()
        threading.Thread(target=process.stderr.read, daemon=True).start()
        assert process.wait(20) == 0


def test_the_old_name_of_the_runtime_starts_it_too(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "aenv.main", str(project(tmp_path, a="1/0")), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, "ZeroDivisionError" in ended.stderr) == (1, True)


def test_the_source_folder_alone_is_enough(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(TOOL.format(name="alone", answer="here"))
    with sandbox(tmp_path) as running:
        assert send(running.port, "POST", "/tools/alone", {}).json["data"] == "here"
    with sandbox(FIXTURES / "lab" / "src") as running:
        assert send(running.port, "GET", "/info").json["data"]["name"] == "lab"


def test_a_signal_ends_a_setup_that_takes_long(tmp_path: Path) -> None:
    setup = "from aenv import register_setup\n@register_setup\ndef slow():\n print('setting up', flush=True)\n"
    setup += " import time; time.sleep(600)\n"
    path = project(tmp_path, a=TOOL.format(name="t", answer=1) + setup)
    process = subprocess.Popen(
        [sys.executable, "-m", "aenv.runtime", str(path), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout as heard:
        assert heard.readline() == "setting up\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_a_second_signal_ends_a_teardown_that_hangs(tmp_path: Path) -> None:
    teardown = (
        "from aenv import register_teardown\n@register_teardown\ndef slow():\n print('tearing down', flush=True)\n"
    )
    teardown += " import time; time.sleep(600)\n"
    path = project(tmp_path, a=TOOL.format(name="t", answer=1) + teardown)
    process = subprocess.Popen(
        [sys.executable, "-m", "aenv.runtime", str(path), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "AENV_GRACE": "600"},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout as heard, process.stderr as log:
        assert "serving" in log.readline()
        process.send_signal(signal.SIGTERM)
        assert heard.readline() == "tearing down\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 1


def test_what_was_set_up_is_torn_down_when_a_later_setup_fails(tmp_path: Path) -> None:
    hooks = (
        "from aenv import register_setup, register_teardown\n"
        "@register_setup\ndef one(): print('up', flush=True)\n"
        "@register_setup\ndef two(): 1/0\n"
        "@register_teardown\ndef down(): print('down', flush=True)\n"
    )
    ended = start(project(tmp_path, a=TOOL.format(name="t", answer=1) + hooks))
    assert (ended.returncode, ended.stdout) == (1, "up\ndown\n")


def test_a_protocol_that_is_not_spoken_is_refused(tmp_path: Path) -> None:
    project(tmp_path, a=TOOL.format(name="t", answer=1))
    (tmp_path / "config.json").write_text(
        '{"name": "x", "version": "1.0.0", "deployConfig": {"protocol": "2031-01-01"}}'
    )
    ended = start(tmp_path)
    assert ended.returncode == 1
    assert "spoken: 2026-07-28" in ended.stderr


HEALTH = "from aenv import register_health\n@register_health\ndef h() -> {kind}:\n    return {value}\n"


@pytest.mark.parametrize(
    ("kind", "value", "status", "shown"),
    [
        ("dict", "{'status': 'ok', 'n': 1}", 200, {"status": "ok", "n": 1}),
        ("bool", "True", 200, {"status": "success"}),
        ("bool", "False", 503, {"status": "unhealthy"}),
        ("'Report'", "Report(status='unhealthy')", 503, {"status": "unhealthy"}),
        ("dict", "{'status': 'ok', 'x': object()}", 503, None),
    ],
)
def test_what_a_health_check_may_answer(tmp_path: Path, kind: str, value: str, status: int, shown: object) -> None:
    model = "from pydantic import BaseModel\nclass Report(BaseModel):\n    status: str\n"
    path = project(tmp_path, a=TOOL.format(name="t", answer=1) + model + HEALTH.format(kind=kind, value=value))
    with sandbox(path) as running:
        reply = send(running.port, "GET", "/health")
        assert reply.status == status
        assert shown in (None, reply.json["data"])
