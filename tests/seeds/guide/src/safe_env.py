# What the guide's "safe-env" offers, which the guide uses and does not show.
import contextlib
import io

from aenv import register_tool


@register_tool
def python(code: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {})
    return printed.getvalue()
