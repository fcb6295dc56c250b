# What the documents use and do not show, and a tool that tells what an instance was given.
import os
import sys

from aenv import Context, register_tool


@register_tool
def analyze(data: str) -> str:
    return f"analyzed {data}"


@register_tool
def given(ctx: Context) -> dict[str, object]:
    names = ("PYTHONPATH", "MODEL_PATH", "API_KEY", "DEBUG", "LOG_LEVEL")
    found = ctx.datasource
    return {
        "variables": {name: os.environ[name] for name in names if name in os.environ},
        "arguments": sys.argv[1:],
        "data": sorted(os.listdir(found)) if found else None,
    }
