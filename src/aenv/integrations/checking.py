"""What the checks of ``aenv train-check`` have in common: a task without a model, and an instance that is lost."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from aenv.client.environment import Environment
from aenv.client.provision import attach
from aenv.errors import AEnvError
from aenv.rl.driven import Driven
from aenv.rl.tasks import Task

ENV = "mini-terminal"
TASK = Task(
    instruction="Write hello into the file note.",
    reward={"checks": [{"kind": "file_contains", "path": "note", "text": "hello"}]},
)
WRITE: dict[str, Any] = {"name": "execute_command", "arguments": {"command": "echo hello > note"}}
"""Does the task."""
LOOK: dict[str, Any] = {"name": "execute_command", "arguments": {"command": "cat note"}}
"""Changes nothing."""
LOSE: dict[str, Any] = {"name": "execute_command", "arguments": {"command": "kill -9 $PPID"}}
"""Ends the instance."""
CHAT = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class CheckFailed(AEnvError):
    """A framework that is installed does not do with an instance what it should."""

    code = "check_failed"


async def lose(env: Environment) -> None:
    """End an instance as a machine does that goes away."""
    with suppress(AEnvError):
        await env.exec("kill -9 $PPID")  # what runs the command is the instance


async def lose_episode(driven: Driven) -> None:
    """End the instance of an episode, behind the back of whoever plays it."""
    sandbox = driven.episode.sandbox
    assert sandbox is not None
    async with Environment(driven.episode.env_name, provision=attach(sandbox.url, sandbox.token)) as another:
        await lose(another)


def tokenizer() -> Any:
    """One of Hugging Face's, made here: a token is a byte, but for those that begin and end a message."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    plain = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=plain)
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "additional_special_tokens": ["<|im_start|>"]}
    made.add_special_tokens(ends)
    made.chat_template = CHAT
    return made


def judge(reward: float, before: str | None, after: str | None) -> str:
    """What became of an episode whose instance was lost after the task was done."""
    if before == after:
        raise CheckFailed(f"instance {before} was ended, and the episode went on in it")
    if reward != 1.0:
        raise CheckFailed(f"an episode that did its task was scored {reward:g}, not 1")
    return "an episode lost its instance, went on in another, and was scored 1"
