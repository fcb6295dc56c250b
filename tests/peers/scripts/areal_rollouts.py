"""AReaL's engine, executor and proxy on instances of ours, with a server that speaks SGLang's ``/generate`` in the
place of a model: ``areal_rollouts.py URL`` prints what a trainer gets, of the example and of what else there is. At the
URL is a server of chat completions."""

import asyncio
import contextlib
import importlib.util
import json
import random
import re
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import uvicorn
from areal.api.cli_args import AgentConfig, GenerationHyperparameters, InferenceEngineConfig
from areal.engine.sglang_remote import RemoteSGLangEngine
from areal.experimental.openai.proxy import proxy_rollout_server
from transformers import PreTrainedTokenizerFast

from aenv import AEnvError
from aenv.integrations.areal import AenvAgent, AenvWorkflow
from aenv.integrations.checking import tokenizer
from aenv.rl import Episode, Rules

CUT = 20
"""Tokens after which an answer is broken off that a change of weights interrupts."""
lost, share, draw = 0, 0.0, random.Random(1)
"""How many episodes have lost their instance; how many of a hundred are to."""


class Server(ThreadingHTTPServer):
    """Presses the key that is shown, or 0 where none is, and says that it is done."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.tokenizer = tokenizer
        self.said: dict[tuple[int, ...], list[int]] = {}
        """What was written, by what was read."""
        self.interrupted: Callable[[], None] | None = None
        """Called once, when an answer was broken off and is to go on."""

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    def answer(self, read: list[int]) -> tuple[list[int], str]:
        text = self.tokenizer.decode(read)
        if "You pressed" in text or '"press"' not in text:
            said = "Done."
        else:
            shown = re.search(r"The display shows (\d)", text)
            call = {"name": "press", "arguments": {"key": int(shown[1]) if shown else 0}}
            said = f"I press. <tool_call>{json.dumps(call)}</tool_call>"
        ids = [*self.tokenizer.encode(said, add_special_tokens=False), self.tokenizer.eos_token_id]
        reason = "stop"
        if read[-CUT:] == ids[:CUT]:
            ids = ids[CUT:]
            if self.interrupted:
                self.interrupted()
                self.interrupted = None
        elif self.interrupted and len(ids) > CUT:
            ids, reason = ids[:CUT], "abort"
        self.said[tuple(read)] = ids
        return ids, reason


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self.tell({})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids, reason = self.server.answer(body["input_ids"])
        probabilities = [[-id / 1024, id, None] for id in ids]
        self.tell({"meta_info": {"finish_reason": {"type": reason}, "output_token_logprobs": probabilities}})

    def tell(self, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@contextlib.contextmanager
def serving() -> Iterator[tuple[Server, str]]:
    """A server, and the folder of its tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        made = tokenizer()
        made.save_pretrained(folder)
        server = Server(made)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server, folder
        server.shutdown()


async def lossy(env: Episode, *args: Any, **options: Any) -> Any:
    """As ``Episode.say``; the instance may be lost when the model has first spoken."""
    global lost
    heard = await say(env, *args, **options)
    if len(env.turns) == 1 and draw.random() < share:
        lost += 1
        with contextlib.suppress(AEnvError):
            await env.exec("kill -9 $PPID")
    return heard


say, Episode.say = Episode.say, lossy  # type: ignore[method-assign]


def example() -> Any:
    """The example's module, in whose folder this runs."""
    spec = importlib.util.spec_from_file_location("rollout_areal", Path("rollout_areal.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def engine(server: Server, **options: Any) -> RemoteSGLangEngine:
    config = InferenceEngineConfig(
        backend="sglang:d1", consumer_batch_size=4, max_concurrent_rollouts=4, check_trajectory_format=True, **options
    )
    made = RemoteSGLangEngine(config)
    made.initialize(addr=server.address)
    return made


def wrong(server: Server, row: dict[str, Any]) -> bool:
    """Whether a row says anything else than what the model read and wrote."""
    ids, mask = row["input_ids"][0].tolist(), row["loss_mask"][0].tolist()
    place = 0
    while place < len(ids):
        if not mask[place]:
            place += 1
            continue
        said = server.said.get(tuple(ids[:place]))
        if not said or ids[place : place + len(said)] != said or not all(mask[place : place + len(said)]):
            return True
        place += len(said)
    expected = [-id / 1024 if one else 0.0 for id, one in zip(ids, mask, strict=True)]
    close = all(abs(a - b) < 1e-6 for a, b in zip(row["logprobs"][0].tolist(), expected, strict=True))
    tagged = all((version >= 0) == bool(one) for version, one in zip(row["versions"][0].tolist(), mask, strict=True))
    return not (close and tagged)


def rollout(server: Server, folder: str, rules: Rules | None = None) -> dict[str, Any]:
    """The example."""
    global lost
    lost = 0
    rows = example().batch(server.address, folder, size=40, rules=rules)
    return {
        "rows": len(rows),
        "rewards": sorted({row["rewards"].item() for row in rows}),
        "wrong": sum(wrong(server, row) for row in rows),
        "lost": lost,
    }


def group(server: Server, folder: str) -> dict[str, Any]:
    """A group, one of which a change of weights interrupts; and all of which see the same digit."""
    made = engine(server)
    server.interrupted = lambda: made.set_version(7)
    workflow = AenvWorkflow("keypad", GenerationHyperparameters(max_new_tokens=256), folder)
    made.submit({"instruction": "Press."}, workflow=workflow, group_size=4)
    (padded,) = made.wait(1)
    made.destroy()
    rows = []
    for place, length in enumerate(padded["attention_mask"].sum(1)):
        rows.append({name: value[place : place + 1, ...][..., :length] for name, value in padded.items()})
    shown = [re.search(r"shows (\d)", server.tokenizer.decode(row["input_ids"][0])) for row in rows]
    return {
        "rewards": padded["rewards"].tolist(),
        "digits": len({found and found[1] for found in shown}),
        "mixed": any({0, 7} <= set(row["versions"][0].tolist()) for row in rows),
        "wrong": sum(wrong(server, row) for row in rows),
    }


def agent(server: Server, folder: str) -> dict[str, Any]:
    """The agent-class form behind AReaL's proxy. Without SGLang or vLLM, that finds no calls in what a model wrote."""
    global share, lost
    lost = 0
    note = {"checks": [{"kind": "file_contains", "path": "note", "text": "hello"}]}
    undone = {"instruction": "Say that it is done.", "reward": note}
    done = {**undone, "files": {"note": "hello\n"}}
    made = engine(server, tokenizer_path=folder, agent=AgentConfig(agent_cls_path="none"))
    proxy_rollout_server._engine, proxy_rollout_server._server_host = made, "127.0.0.1"
    proxy_rollout_server._setup_openai_client()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        proxy = uvicorn.Server(uvicorn.Config(proxy_rollout_server.app, log_level="warning"))
        threading.Thread(target=proxy.run, args=([listening],), daemon=True).start()
        address = "http://127.0.0.1:{1}".format(*listening.getsockname())

        def played(task: dict[str, Any]) -> Any:
            return made.wait_for_task(made.submit(task, workflow=AenvAgent("mini-terminal"), proxy_addr=address))

        rows = [played(done), played(undone)]
        share = 1.0
        rejected = played(done) is None
        share = 0.0
        made.destroy()
        proxy.should_exit = True
    return {
        "rewards": [row["rewards"].item() for row in rows],
        "wrong": sum(wrong(server, row) for row in rows),
        "rejected": rejected,
        "lost": lost,
    }


def calls(url: str) -> list[float]:
    """The agent-class form with calls of tools."""
    play = AenvAgent("keypad", system="Be brief.", parameters={"temperature": 0.5}).run
    tasks = [{**task, "seed": 7, "answer": "a column of the dataset"} for task in example().TASKS[:2]]
    return [asyncio.run(play(task, base_url=url, api_key="sk-one")) for task in tasks]


if __name__ == "__main__":
    with serving() as (server, folder):
        found: dict[str, Any] = {"whole": rollout(server, folder)}
        share = 0.2
        found["lossy"] = rollout(server, folder)
        found["rejecting"] = rollout(server, folder, Rules(retries=0))
        share = 0.0
        found["group"] = group(server, folder)
        found["agent"] = agent(server, folder)
    found["calls"] = calls(sys.argv[1])
    print(json.dumps(found))
