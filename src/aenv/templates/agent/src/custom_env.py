"""An agent as an environment: the support desk of a shop, which others talk to.

It goes by rules, and needs nothing for that. With the variable MODEL_URL it asks a model instead, at any server that
speaks OpenAI's chat completions, such as http://localhost:8000/v1; MODEL_NAME and MODEL_KEY are that server's.
"""

import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.request import Request, urlopen

from aenv import Context, Conversation, ModelError, register_agent, register_reward

ORDERS = {"A17": "left the warehouse on Monday", "B42": "is waiting for a part", "C03": "was delivered yesterday"}
PROMPT = f"You are the support desk of a shop. Be brief. Orders: {json.dumps(ORDERS)}"


@register_agent
def support(message: str, conversation: Conversation, ctx: Context) -> str:
    """The support desk of a shop, which knows where an order is.

    Args:
        message: What a customer says.
    """
    variables = ctx.environment_variables
    if variables.get("MODEL_URL"):
        return by_model([*conversation.messages, {"role": "user", "content": message}], variables)
    return by_rules(message, conversation.state)


def by_rules(message: str, state: dict[str, Any]) -> str:
    """An answer that needs no model. ``state`` is what the agent remembers of the conversation."""
    if found := re.search(r"\b[A-Z]\d\d\b", message.upper()):
        state["order"] = found[0]
    order = state.get("order")
    if order is None:
        return "Which order is it? Its number is a letter and two digits."
    if order not in ORDERS:
        del state["order"]
        return f"There is no order {order}. Would you look again?"
    return f"Order {order} {ORDERS[order]}."


def by_model(messages: list[dict[str, str]], variables: Mapping[str, str]) -> str:
    """A model's answer. That the model cannot be reached is no answer: ``ModelError`` ends the caller's run."""
    body = {
        "model": variables.get("MODEL_NAME", "default"),
        "messages": [{"role": "system", "content": PROMPT}, *messages],
    }
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {variables.get('MODEL_KEY', 'none')}"}
    url = f"{variables['MODEL_URL'].rstrip('/')}/chat/completions"
    try:
        with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=120) as response:
            answer = json.load(response)["choices"][0]["message"]["content"]
    except (OSError, ValueError, LookupError, TypeError) as exc:
        raise ModelError(f"{url} did not answer: {exc}") from exc
    if not isinstance(answer, str):
        raise ModelError(f"{url} answered without a text")
    return answer


@register_reward
def told(order: str, conversations: list[Conversation]) -> dict[str, Any]:
    """1.0 when a customer was told where the order is with the first answer, a tenth less for each more that it took.

    Args:
        order: The number of the order.
    """
    for conversation in conversations:
        answers = [said["content"] for said in conversation.messages if said["role"] == "assistant"]
        for number, answer in enumerate(answers):
            if ORDERS[order] in answer:
                return {"score": max(1.0 - 0.1 * number, 0.1), "session": conversation.session}
    return {"score": 0.0, "session": None}
