"""A tool, a reward, a function and a health check: the four things an environment is made of."""

from typing import Any

from aenv import register_function, register_health, register_reward, register_tool


@register_tool
def echo(content: str, times: int = 1) -> dict[str, str]:
    """Repeat what was said.

    Args:
        content: The text to repeat.
        times: How often, at least once.
    """
    if times < 1:
        raise ValueError("times must be 1 or more")
    return {"result": " ".join([content] * times)}


@register_reward
def exact_match(answer: str, expected: str) -> dict[str, Any]:
    """1.0 when the answer is the expected text, apart from spaces around it; else 0.0.

    Args:
        answer: What the agent answered.
        expected: What it should have answered.
    """
    right = answer.strip() == expected.strip()
    return {"score": 1.0 if right else 0.0, "expected": expected, "answer": answer}


@register_function
def count_words(text: str) -> dict[str, int]:
    """Count the words of a text. For the program that runs the agent, not for the agent.

    Args:
        text: Any text.
    """
    return {"words": len(text.split())}


@register_health
def health() -> dict[str, str]:
    """Called before the sandbox counts as ready, and every time somebody asks."""
    return {"status": "healthy"}
