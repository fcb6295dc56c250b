"""``aenv serve models`` as a process, and its episodes over HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from aenv import http
from tests.rl.model_gateway.support import asking, ids, standin_process

TOKEN = "aenv_" + "t" * 43
AENV = [sys.executable, "-c", "import sys; from aenv.cli import main; sys.exit(main())"]


async def _asked(method: str, url: str, path: str, token: str, body: object = None) -> tuple[int, dict[str, object]]:
    sent = b"" if body is None else msgspec.json.encode(body)
    lines = f"Authorization: Bearer {token}\r\nContent-Type: application/json\r\n".encode()
    answer = await http.request(method, url, path, headers=lines, body=sent, retries=0)
    return answer.status, msgspec.json.decode(answer.body)


async def test_episodes_of_a_gateway_elsewhere(tmp_path: Path) -> None:
    with standin_process() as (_, upstream):
        env = {**os.environ, "AENV_HOME": str(tmp_path), "AENV_MODELS_TOKEN": TOKEN}
        command = [*AENV, "serve", "models", "--upstream", upstream, "--port", "0", "-o", "json"]
        command += ["--allow-field", "chat_template_kwargs"]
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                url = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")["url"]
                assert (await _asked("POST", url, "/episodes", "wrong", {}))[0] == 401
                status, begun = await _asked("POST", url, "/episodes", TOKEN, {"max_calls": 1})
                assert status == 201
                data = begun["data"]
                assert isinstance(data, dict)
                chat = "/v1/chat/completions"
                body = asking("say hello", chat_template_kwargs={"enable_thinking": False})
                assert (await _asked("POST", url, chat, str(data["key"]), body))[0] == 200
                assert (await _asked("POST", url, chat, str(data["key"]), asking("say hello")))[0] == 429
                assert (await _asked("POST", url, chat, TOKEN, asking("say hello")))[0] == 401
                status, ended = await _asked("DELETE", url, f"/episodes/{data['id']}", TOKEN)
                kept = ended["data"]
                assert isinstance(kept, dict)
                assert kept["records"][0]["tokens"]["completion"] == ids("hello")
                assert kept["spent"]
                assert (await _asked("POST", url, chat, str(data["key"]), asking("say hello")))[0] == 401
                assert (await _asked("GET", url, f"/episodes/{data['id']}", TOKEN)) == (200, ended)
                assert (await _asked("GET", url, "/episodes/none", TOKEN))[0] == 404
            finally:
                process.terminate()
    assert process.returncode == 0


def test_what_is_refused(tmp_path: Path) -> None:
    env = {**os.environ, "AENV_HOME": str(tmp_path)}
    env.pop("AENV_MODELS_TOKEN", None)
    for options, words in (
        ([], "needs --upstream"),
        (["--upstream", "http://127.0.0.1:9/v1", "--host", "0.0.0.0"], "AENV_MODELS_TOKEN"),
        (["--upstream", "http://127.0.0.1:9/v1", "--upstream-key", "NO_SUCH"], "NO_SUCH is not set"),
    ):
        done = subprocess.run([*AENV, "serve", "models", *options], env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode
        assert words in done.stderr
