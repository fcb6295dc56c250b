"""Samples as slime has them, filled in by the functions that it is given, with a server of SGLang's kind on a real
socket: ``slime_samples.py FOLDER`` prints what became of them."""

import asyncio
import itertools
import json
import re
import sys
from dataclasses import dataclass, field
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, ClassVar

import yaml
from tests.peers.scripts.tiny import make, pressing, spelled

from aenv import AEnvError, Environment
from aenv.integrations.slime import generate, is_scored, reward
from aenv.rl import Episode

STRICT = {"fast_forward": False, "retries": 0}
LONGEST = 256
DIGIT = 3


class Status(Enum):
    """That of slime's samples."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """What is read and written of slime's samples, which are on no package index: ``slime.utils.types.Sample``."""

    group_index: int | None = 0
    index: int | None = 0
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    session_id: str | None = "session-1"


class Served(BaseHTTPRequestHandler):
    """SGLang's ``/generate``: presses the key that is shown, letter by letter, and does what the prompt says beside."""

    protocol_version = "HTTP/1.1"
    tokenizer: Any = None
    asked: ClassVar[list[dict[str, Any]]] = []
    keys: ClassVar[list[str | None]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        self.keys.append(self.headers["X-SMG-Routing-Key"])
        text = self.tokenizer.decode(body["input_ids"])
        if self.path != "/generate" or "refused" in text:
            self.answer(400, {"error": {"message": "refused"}})
            return
        said = "Done." if "You pressed" in text else pressing(int(re.findall(r"The display shows (\d)", text)[-1]))
        ids = spelled(self.tokenizer, said)[: body["sampling_params"]["max_new_tokens"]]
        reason = "abort" if "aborted" in text else "stop" if ids[-1] == self.tokenizer.eos_token_id else "length"
        pairs = [[-(id % 16) / 16, id, None] for id in ids]
        meta = {"finish_reason": {"type": reason}, "output_token_logprobs": pairs, "weight_version": "7"}
        self.answer(200, {"text": said, "meta_info": meta})

    def answer(self, status: int, told: dict[str, Any]) -> None:
        data = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing: what is printed is the answer."""


def rig() -> None:
    """Let every other instance of tasks that say so be lost before a call."""
    call, turns = Episode.call_tool, itertools.count()

    async def lossy(env: Episode, name: str, *args: Any, **kwargs: Any) -> Any:
        if env.task.metadata.get("lossy") and next(turns) % 2 == 0:
            await Environment.exec(env, "kill -9 $PPID")
        return await call(env, name, *args, **kwargs)

    Episode.call_tool = lossy  # type: ignore[method-assign]


def sample(index: int = 0, *, longest: int = LONGEST, **more: Any) -> tuple[Sample, dict[str, Any]]:
    """The example's row of that digit, with more in its task, and how the model is asked."""
    row = json.loads(Path("slime/keypad.jsonl").read_text().splitlines()[DIGIT])
    task = {**row["metadata"]["task"], **more}
    parameters = {"temperature": 1.0, "max_new_tokens": longest, "no_stop_trim": True}
    return Sample(index=index, prompt=row["prompt"], metadata={"task": task, "origin": "kept"}), parameters


async def main(folder: Path) -> dict[str, Any]:
    tokenizer = Served.tokenizer = make(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Served)
    Thread(target=server.serve_forever, daemon=True).start()
    args = SimpleNamespace(
        hf_checkpoint=str(folder),
        sglang_router_ip="127.0.0.1",
        sglang_router_port=server.server_address[1],
        router_policy="consistent_hashing",
        **yaml.safe_load(Path("slime/keypad.yaml").read_text()),
    )
    retries, args.aenv_rules = args.aenv_rules, STRICT
    rig()
    lossy = {"lossy": True}
    cases = {
        "calm": sample(),
        "lossy 1": sample(1, metadata=lossy),
        "lossy 2": sample(2, metadata=lossy),
        "cut": sample(longest=20),
        "no room": sample(longest=len(spelled(tokenizer, pressing(DIGIT))) + 2),
        "aborted": sample(instruction="aborted"),
        "refused": sample(instruction="refused"),
        "prompt alone": (Sample(group_index=5, prompt="Press the key that is shown."), sample()[1]),
        "messages alone": (Sample(prompt=[{"role": "user", "content": "Press it."}]), sample()[1]),
    }
    for given, parameters in cases.values():
        assert await generate(args, given, parameters) is given
    assert parameters["max_new_tokens"] == LONGEST
    evaluated = await generate(args, sample(instruction="refused")[0], sample()[1], evaluation=True)
    again = cases["aborted"][0]
    again.metadata["task"]["instruction"] = "Press the key that is shown."
    found = {name: told(given, tokenizer) for name, (given, _) in cases.items()}
    await generate(args, again, sample()[1])
    args.aenv_rules = retries
    retried, parameters = sample(metadata=lossy)
    await generate(args, retried, parameters)
    args.aenv_env = "no-such-environment"
    try:
        await generate(args, *sample())
    except AEnvError as exc:
        raised = exc.code
    calm, failed = cases["calm"][0], cases["refused"][0]
    return {
        "samples": {**found, "again": told(again, tokenizer), "retried": told(retried, tokenizer)},
        "rewards": [await reward(args, calm), await reward(args, [calm, failed])],
        "kept": [is_scored(args, group) for group in ([calm], [calm, failed], [evaluated])],
        "evaluated": str(evaluated.reward),
        "asked": [Served.asked[0]["sampling_params"], Served.asked[0]["return_logprob"]],
        "raised": raised,
        "keys": sorted({str(key) for key in Served.keys}),
    }


def told(of: Sample, tokenizer: Any) -> dict[str, Any]:
    """What a trainer takes of it, and whether the ids that are trained on are those that the model wrote."""
    prompt = len(of.tokens) - of.response_length
    mask, logprobs = of.loss_mask or [], of.rollout_log_probs or []
    trained = [id for id, is_on in zip(of.tokens[prompt:], mask, strict=True) if is_on]
    written = spelled(tokenizer, pressing(DIGIT)) + spelled(tokenizer, "Done.")
    right = [-(id % 16) / 16 if is_on else 0.0 for id, is_on in zip(of.tokens[prompt:], mask, strict=True)]
    return {
        "status": of.status.value,
        "reward": of.reward,
        "removed": of.remove_sample,
        "length": of.response_length,
        "is_whole": trained == written,
        "is_exact": trained == written[: len(trained)] and logprobs == right,
        "response": of.response,
        "weights": of.weight_versions,
        "failure": of.metadata.get("aenv_failure", ""),
        "origin": of.metadata.get("origin", ""),
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1])))))
