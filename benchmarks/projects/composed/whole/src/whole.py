"""An environment that needs two others."""

from aenv import Context, register_tool


@register_tool
def echo(text: str) -> str:
    return text


@register_tool
async def through(text: str, ctx: Context) -> str:
    return (await ctx.env("left").call_tool("echo", {"text": text})).text
