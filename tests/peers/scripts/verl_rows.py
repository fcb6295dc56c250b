"""verl itself, with its own settings, dataset, workers and queue of rows, and a model that does as it is told: the rows
that its trainer takes from the queue. ``verl_rows.py FOLDER`` prints what became of each prompt, and what was wrong."""

import asyncio
import collections
import importlib.util
import itertools
import json
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

import pandas
import ray
import transfer_queue
import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from tests.peers.scripts.tiny import make, pressing, spelled
from torch.utils.data import DataLoader
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils import tensordict_utils
from verl.utils.config import validate_config
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.workers.rollout.replica import TokenOutput

from aenv import Environment
from aenv.client.provision import attach
from aenv.integrations.checking import lose
from aenv.rl import Episode

SAMPLES = 4
FINAL = ("finished", "failure")
STRICT = {"fast_forward": False, "retries": 0}
LOOPS = [
    {"name": "strict", "_target_": "aenv.integrations.verl.AenvAgentLoop", "env": "keypad", "rules": STRICT},
    {"name": "strict_tools", "_target_": "aenv.integrations.verl.AenvToolLoop", "env": "keypad", "rules": STRICT},
]
"""Beside those of the example: they try nothing again."""


class Model:
    """In the place of verl's client of its servers, in the process of the worker: presses the key that is shown and the
    next one in turn, letter by letter. Of a task that is called lossy, every other instance is lost at its call."""

    def __init__(self, tokenizer: Any, raised: Path) -> None:
        self.tokenizer = tokenizer
        self.raised = raised
        self.turns = itertools.count()
        self.is_rigged = False

    async def generate(self, request_id: str, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        if not self.is_rigged:
            self.is_rigged = True
            rig()
            logging.getLogger("verl.trainer.ppo.v1.agent_loop_tq").addHandler(Raised(self.raised))
        text = self.tokenizer.decode(prompt_ids)
        said = "Done." if "You pressed" in text else pressing((shown(text) + next(self.turns) % 2) % 5)
        ids = spelled(self.tokenizer, said)
        reason = "aborted" if "aborted" in text else "completed"
        steps = {"min_global_steps": 3, "max_global_steps": 3}
        return TokenOutput(token_ids=ids, log_probs=[logprob(id) for id in ids], stop_reason=reason, extra_fields=steps)


class Raised(logging.Handler):
    """Writes down what was raised out of loops, which verl only logs."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            uid = record.getMessage().partition("uid=")[2]
            with self.file.open("a") as file:
                file.write(json.dumps([uid, str(record.exc_info[1])]) + "\n")


def rig() -> None:
    """Let instances be lost."""
    call, turns = Episode.call_tool, collections.Counter[str]()

    async def lossy(env: Episode, name: str, *args: Any, **kwargs: Any) -> Any:
        about = env.task.metadata.get("about", "")
        turns[about] += 1
        if "lossy" in about and turns[about] % 2:
            sandbox = env.sandbox
            async with Environment(env.env_name, provision=attach(sandbox.url, sandbox.token)) as another:
                await lose(another)
        return await call(env, name, *args, **kwargs)

    Episode.call_tool = lossy  # type: ignore[method-assign]


def shown(text: str) -> int:
    return int(re.findall(r"The display shows (\d)", text)[-1])


def logprob(id: int) -> float:
    return -(id % 16) / 16


def example() -> Any:
    """The example's module, in whose folder this runs."""
    spec = importlib.util.spec_from_file_location("train_verl", Path("train_verl.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prompts(module: Any) -> dict[str, dict[str, Any]]:
    """The rows of the dataset, by what they are about."""
    found = {}
    for loop in ("keypad", "keypad_tools", "strict", "strict_tools"):
        for kind in ("calm", "lossy"):
            (row,) = module.rows(1, loop)
            task = json.loads(row["task"])
            row["task"] = json.dumps({**task, "metadata": {"about": f"{loop} {kind}"}})
            found[f"{loop} {kind}"] = row
    (found["prompt alone"],) = module.rows(1, "strict")
    found["prompt alone"]["task"] = None
    (found["no episode"],) = module.rows(1, "tool_agent")
    for kind in ("aborted", "too long"):
        (row,) = module.rows(1, "strict")
        row["task"] = json.dumps({"instruction": "aborted" if kind == "aborted" else "long " * 600})
        found[kind] = row
    (found["wrong task"],) = module.rows(1, "strict")
    found["wrong task"]["task"] = json.dumps({"tools": ["none"]})
    for name, row in found.items():
        row["about"] = name
    return found


async def main(folder: Path) -> dict[str, Any]:
    module = example()
    tokenizer = make(folder)
    loops = folder / "loops.yaml"
    loops.write_text(Path("verl/loops.yaml").read_text() + yaml.safe_dump(LOOPS))
    data = folder / "keypad.parquet"
    pandas.DataFrame(prompts(module).values()).to_parquet(data)
    own = [
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        "data.filter_overlong_prompts=false",
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [*module.settings(folder, data), *own])
    validate_config(config, need_reference_policy(config), need_critic(config))
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)  # logical ones, of which each actor takes one
    transfer_queue.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    dataset = RLHFDataset(str(data), tokenizer, config.data)
    (batch,) = DataLoader(dataset, batch_size=len(dataset), collate_fn=collate_fn)
    batch["uid"] = batch["about"]
    found = tensordict_utils.get_tensordict(batch)
    tensordict_utils.assign_non_tensor_data(found, "global_steps", 3)
    worker = AgentLoopWorkerTQ.remote(config, Model(tokenizer, folder / "raised"))
    await worker.generate_sequences.remote(found)
    while True:
        told = transfer_queue.kv_list("train").get("train", {})
        if all(told.get(name, {}).get("status") in FINAL for name in batch["uid"]):
            break
        await asyncio.sleep(0.2)
    raised = [json.loads(line) for line in (folder / "raised").read_text().splitlines()]
    return {
        name: {**of_prompt(name, told, tokenizer), "raised": sorted({text for uid, text in raised if uid == name})}
        for name in batch["uid"]
    }


def of_prompt(name: str, told: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """What became of its samples. A row is wrong when its reward is not that of what is trained on in it, and when what
    is trained on is not what the model wrote."""
    keys = [key for key in told if key.startswith(f"{name}_")]
    status = told[name]["status"]
    if not keys:
        return {"status": status, "rewards": [], "wrong": []}
    rows = transfer_queue.kv_batch_get(keys, "train")
    rewards, wrong = [], []
    for at, key in enumerate(keys):
        prompt, response, mask, logprobs, scores = (
            rows[field][at].tolist()
            for field in ("prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores")
        )
        rewards.append(sum(scores))
        digit = shown(tokenizer.decode(prompt))
        pressed = int(re.findall(r'"key": (\d)', tokenizer.decode(response))[0])
        trained = [id for id, is_on in zip(response, mask, strict=True) if is_on]
        expected = spelled(tokenizer, pressing(pressed)) + spelled(tokenizer, "Done.")
        right = [logprob(id) if is_on else 0.0 for id, is_on in zip(response, mask, strict=True)]
        if trained != expected or logprobs != right or rewards[-1] != float(pressed == digit):
            wrong.append({"key": key, "text": tokenizer.decode(prompt + response), "reward": rewards[-1]})
    return {"status": status, "rewards": sorted(rewards), "wrong": wrong}


if __name__ == "__main__":
    os.environ["VERL_LOGGING_LEVEL"] = "ERROR"
    answer = asyncio.run(main(Path(sys.argv[1])))
    print(json.dumps(answer))
