"""verifiers' own taskset for OpenEnv, in an instance of ours: ``verifiers_script.py URL [PID]``.

The model is a small server that reads the display and answers with an action. With a PID it ends that process after its
first answer: the instance, in the middle of the episode.
"""

import asyncio
import contextlib
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.tasksets.openenv import OpenEnvEnv, OpenEnvEnvConfig

os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # verifiers needs uv
VICTIM = int(sys.argv[2]) if len(sys.argv) > 2 else 0


def action(said: str) -> dict[str, Any]:
    """What a model that can read does."""
    seen = json.loads(said)["observation"]
    if "tool_name" in seen:
        return {"type": "call_tool", "tool_name": "finish", "arguments": {}}
    key = int(seen["result"].rstrip(".").split()[-1])
    return {"type": "call_tool", "tool_name": "press", "arguments": {"key": key}}


class Model(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        content = body["messages"][-1]["content"]
        said = content if isinstance(content, str) else content[-1]["text"]
        answer = json.dumps(action(said))
        if VICTIM and len(body["messages"]) == 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(VICTIM, 9)
        whole = {"id": "x", "created": 0, "model": "reader"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        if body.get("stream"):
            delta = {"role": "assistant", "content": answer}
            parts = [
                {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
                {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": usage},
            ]
            chunks = [json.dumps({**whole, "object": "chat.completion.chunk", **part}) for part in parts]
            data = "".join(f"data: {chunk}\n\n" for chunk in (*chunks, "[DONE]")).encode()
            kind = "text/event-stream"
        else:
            message = {"role": "assistant", "content": answer}
            choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
            data = json.dumps({**whole, "object": "chat.completion", "choices": choices, "usage": usage}).encode()
            kind = "application/json"
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


async def main() -> dict[str, Any]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = OpenEnvEnvConfig(
        taskset={"id": "openenv", "base_url": sys.argv[1], "resets": [{"digit": 3}]},
        player={"harness": {"id": "null"}, "runtime": {"type": "subprocess"}},
    )
    env = OpenEnvEnv(config)
    client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key_var="NO_KEY")
    model = vf.ModelContext(model="reader", client=client, sampling=vf.SamplingConfig())
    async with env.serving():
        (task,) = env.taskset
        episode = await env.run_episode(task, model)
    return {
        "ok": episode.ok,
        "errors": [error.type for error in episode.errors],
        "traces": [
            {
                "ok": trace.ok,
                "rewards": {name: one and one.value for name, one in trace.rewards.items()},
                "errors": [[error.type, error.message[:500]] for error in trace.errors],
            }
            for trace in episode.traces
        ],
        "messages": [error.message[:300] for error in episode.errors],
    }


print(json.dumps(asyncio.run(main())))
