"""GRPO of TRL on the keypad: a model of 100,000 parameters, made here, learns which key to press.

It is first shown how a call is written, since a model that never calls a tool has nothing to learn from: with the right
keys, and then with keys at random but for one in twenty, so that it presses any.
"""

import os
import random
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the network is small, and threads would only wait for each other

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template

from aenv.integrations.trl import environment_factory

KEYS = 5
PROMPT = "Press the key that is shown."
CALL = '<tool_call>\n{"name": "press", "arguments": {"key": %d}}\n</tool_call><|im_end|>'
ANSWER = "\n<|im_start|>user\n<tool_response>\nYou pressed %d.\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
END = "Done.<|im_end|>"


def asked(tokenizer: PreTrainedTokenizerFast, tools: list, shown: int) -> str:
    """What the model reads when that digit is shown."""
    said = [{"role": "user", "content": f"{PROMPT}\n\nThe display shows {shown}."}]
    return tokenizer.apply_chat_template(said, tools=tools, tokenize=False, add_generation_prompt=True)


def made(tools: list) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """A model that knows nothing, and a tokenizer of the words that it will read, with a token for a digit."""
    bare = Tokenizer(models.BPE())
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, chat_template=qwen3_chat_template)
    words = asked(tokenizer, tools, 0) + CALL % 0 + ANSWER % 0 + END
    bare.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bare.decoder = decoders.ByteLevel()
    bare.train_from_iterator(
        [words],
        trainers.BpeTrainer(
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    bare.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bare, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=qwen3_chat_template
    )
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        initializer_range=0.1,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config), tokenizer


def warmed(tools: list, seed: int) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """A model that knows how a call is written, and hardly any more which key is right."""
    model, tokenizer = made(tools)
    drawn = random.Random(seed)
    prompts = [tokenizer.encode(asked(tokenizer, tools, shown)) for shown in range(KEYS)]
    answers = [[tokenizer.encode(text) for text in (CALL % key, ANSWER % key, END)] for key in range(KEYS)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def step(right: float) -> float:
        ids, labels = [], []
        for _ in range(8):
            shown = drawn.randrange(KEYS)
            key = shown if drawn.random() < right else drawn.randrange(KEYS)
            prompt, (call, answer, end) = prompts[shown], answers[key]
            ids.append(prompt + call + answer + end)
            labels.append([-100] * len(prompt) + call + [-100] * len(answer) + end)
        loss = model(input_ids=torch.tensor(ids), labels=torch.tensor(labels)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    losses = [1.0] * 10
    while sum(losses[-10:]) > 0.2 and len(losses) < 400:
        losses.append(step(right=1.0))
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    for _ in range(60):
        step(right=0.05)
    return model, tokenizer


def config(seed: int, steps: int) -> GRPOConfig:
    return GRPOConfig(
        output_dir="trained",
        seed=seed,
        max_steps=steps,
        per_device_train_batch_size=32,
        num_generations=8,
        max_completion_length=56,
        max_tool_calling_iterations=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
    )


def train(seed: int = 1, steps: int = 60) -> GRPOTrainer:
    """The trainer, when it is done."""
    set_seed(seed)
    torch.set_num_threads(1)
    keypad = environment_factory("keypad")
    model, tokenizer = warmed([keypad().press], seed)
    rows = [{"prompt": [{"role": "user", "content": PROMPT}], "reset": {"digit": n % KEYS}} for n in range(1000)]
    trainer = GRPOTrainer(
        model,
        args=config(seed, steps),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        environment_factory=keypad,
    )
    trainer.train()
    return trainer


def curve(trainer: GRPOTrainer) -> list[float]:
    """The mean reward of an episode, step by step."""
    return [row["reward"] for row in trainer.state.log_history if "reward" in row]


def means(trainer: GRPOTrainer) -> tuple[float, float]:
    """The same in the first five steps, and in the last."""
    rewards = curve(trainer)
    return sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5


if __name__ == "__main__":
    before, after = means(train(seed=int(sys.argv[1]) if len(sys.argv) > 1 else 1))
    print(f"mean reward of an episode: {before:.2f} in the first five steps, {after:.2f} in the last five")
