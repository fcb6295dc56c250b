"""Train a model to press the key that is shown, with verl: ``python train_verl.py MODEL [SETTING=VALUE ...]``.

MODEL is a path or a name on a model hub; settings are verl's. It needs a GPU, and verl with vLLM.
"""

import json
import subprocess
import sys
from pathlib import Path

import pandas

HERE = Path(__file__).resolve().parent
KEYS = 5


def rows(count, loop):
    """A row a prompt, the digits in turn. The task says which digit is shown; the prompt is what verl's own loop of
    tools asks the model, where ``AenvAgentLoop`` makes its own of the task and of what the reset returned."""
    for number in range(count):
        digit = number % KEYS
        task = {"instruction": "Press the key that is shown.", "reset": {"digit": digit}}
        yield {
            "data_source": "keypad",
            "agent_name": loop,
            "task": json.dumps(task),
            "prompt": [{"role": "user", "content": f"{task['instruction']}\n\nThe display shows {digit}."}],
            "reward_model": {"ground_truth": ""},  # verl wants the column; the reward comes with the episode
        }


def settings(model, data):
    """What verl is told."""
    rollout = "actor_rollout_ref.rollout"
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={data}",
        f"data.val_files={data}",
        "data.train_batch_size=32",
        "data.max_prompt_length=512",
        "data.max_response_length=512",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        f"{rollout}.name=vllm",
        f"{rollout}.n=8",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.multi_turn.enable=true",
        f"{rollout}.multi_turn.tool_config_path={HERE}/verl/tools.yaml",
        f"{rollout}.agent.agent_loop_config_path={HERE}/verl/loops.yaml",
        "trainer.n_gpus_per_node=1",
        "trainer.project_name=keypad",
    ]


def main(model, *more):
    data = HERE / "keypad.parquet"
    pandas.DataFrame(rows(320, "keypad")).to_parquet(data)
    subprocess.run([sys.executable, "-m", "verl.trainer.main_ppo", *settings(model, data), *more], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
