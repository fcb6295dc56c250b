"""Episodes as AReaL's trainers take them: ``rollout_areal.py HOST:PORT TOKENIZER``, with a server of SGLang's."""

import sys
from typing import Any

from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig
from areal.engine.sglang_remote import RemoteSGLangEngine

from aenv.integrations.areal import AenvWorkflow
from aenv.rl import Rules

TASKS = [{"instruction": "Press the key that is shown.", "reset": {"digit": digit}} for digit in range(5)]


def batch(address: str, tokenizer: str, size: int = 8, rules: Rules | None = None) -> list[dict[str, Any]]:
    """The rows of so many episodes, but for those that were rejected."""
    config = InferenceEngineConfig(
        backend="sglang:d1", consumer_batch_size=size, max_concurrent_rollouts=size, check_trajectory_format=True
    )
    engine = RemoteSGLangEngine(config)
    engine.initialize(addr=address)
    try:
        workflow = AenvWorkflow("keypad", GenerationHyperparameters(max_new_tokens=256), tokenizer, rules=rules)
        tasks = (TASKS * size)[:size]
        return engine.rollout_batch(tasks, workflow=workflow)
    finally:
        engine.destroy()


if __name__ == "__main__":
    rows = batch(*sys.argv[1:3])
    rewards = [row["rewards"].item() for row in rows]
    print(f"{len(rows)} episodes, mean reward {sum(rewards) / len(rewards):.2f}")
