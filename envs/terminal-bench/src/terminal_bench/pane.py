"""The terminal: a session of tmux in the second container, which begins with the first key."""

from __future__ import annotations

from collections.abc import Sequence

from aenv import ToolError
from terminal_bench.box import Box

COLUMNS, ROWS = 160, 40
MOST_KEYS = 4000
_SOCKET, _SESSION = "aenv", "agent"
_HISTORY = 10_000


async def press(box: Box, keys: Sequence[str]) -> None:
    """Type: a key's name, as tmux has them, is that key, and any other text is typed as it is."""
    if sum(map(len, keys)) > MOST_KEYS:
        raise ToolError(f"at most {MOST_KEYS} characters are typed at once: write a file with execute_command instead")
    await _begin(box)
    await _tmux(box, "send-keys", "-t", _SESSION, "--", *keys)


async def screen(box: Box, history: int = 0) -> str:
    """What is on the screen, and so many lines above it."""
    await _begin(box)
    above = ("-S", str(-min(history, _HISTORY))) if history > 0 else ()
    return (await _tmux(box, "capture-pane", "-p", "-t", _SESSION, *above)).rstrip("\n")


async def _begin(box: Box) -> None:
    if not await box.has_tmux():
        raise ToolError("there is no tmux in this task's image, so there is no terminal: use execute_command")
    if (await _ask(box, "has-session", "-t", _SESSION))[0] == 0:
        return
    size = ("-x", str(COLUMNS), "-y", str(ROWS))
    shell = ("bash",) if await box.shell() == "bash" else ("sh",)
    await _tmux(box, "new-session", "-d", "-s", _SESSION, *size, *shell)
    await _tmux(box, "set-option", "-g", "history-limit", str(_HISTORY))


async def _tmux(box: Box, *words: str) -> str:
    code, out, errors = await _ask(box, *words)
    if code:
        raise ToolError(f"the terminal failed: {errors.strip() or f'tmux {words[0]} ended with {code}'}")
    return out


async def _ask(box: Box, *words: str) -> tuple[int, str, str]:
    variables = {"LANG": "C.UTF-8", "TERM": "xterm-256color", **box.variables}
    command = ["tmux", "-u", "-L", _SOCKET, "-f", "/dev/null", *words]
    done = await box.second.exec(command, cwd=box.workdir, env=variables, timeout=20)
    return done.returncode, done.stdout, done.stderr
