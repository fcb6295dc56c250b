# ruff: noqa
# fmt: off
from typing import Dict, Any
from aenv import register_tool

@register_tool
def my_custom_echo_env(content: str) -> Dict[str, Any]:
    """
    Custom environment tool description.
    This tool receives any string content and returns it as-is output, used to verify environment integration effects.
    Args:
        content: Any content to echo
    Returns:
        Dictionary containing results in format {"result": "original content"}
    """
    return {"result": f"{content}"}
