"""A tokenizer made here, and a model's configuration beside it, as trainers load them from a folder."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config

END = "<|im_end|>"
TEXTS = [
    '{"name": "press", "arguments": {"key": }}',
    "Press the key that is shown. The display shows You pressed Done.",
]
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make(folder: Path) -> PreTrainedTokenizerFast:
    """Write both into a folder. Words are tokens of their own; so are all letters."""
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", END]
    bare.train_from_iterator(
        TEXTS * 4, trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet)
    )
    bare.add_tokens([AddedToken(word, special=False) for word in ("<tool_call>", "</tool_call>")])
    found = PreTrainedTokenizerFast(
        tokenizer_object=bare, eos_token=END, pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    found.save_pretrained(folder)
    Qwen3Config(architectures=["Qwen3ForCausalLM"], vocab_size=len(found)).save_pretrained(folder)
    return found


def spelled(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """The text as a model may write it, and no tokenizer would: letter by letter, and the end of a message."""
    return [id for letter in text for id in tokenizer.encode(letter, add_special_tokens=False)] + [
        tokenizer.eos_token_id
    ]


def pressing(key: int) -> str:
    """A call as the model writes it."""
    return f'<tool_call>\n{{"name": "press", "arguments": {{"key": {key}}}}}\n</tool_call>'
