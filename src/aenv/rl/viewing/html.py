"""Trajectories as one page for a browser: it loads nothing, and runs no script but its own.

The data stands in blocks that no browser runs, one for each episode, which is read when it is chosen.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import msgspec

from aenv.models import to_json
from aenv.rl.trajectory import Scored, Trajectory
from aenv.rl.viewing import steps

LONGEST_TEXT = 100_000
"""Characters of one text that the page holds: more than anybody reads, and a thousand episodes still open."""
LARGEST_IMAGE = 4_000_000
"""Characters of an image in base64. A larger one is left out, since a part of it shows nothing."""
DEEPEST = 50
"""Levels of lists and objects in each other."""
_ESCAPES = str.maketrans({char: f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"})
_SEARCHED = 2000


def page(
    trajectories: Iterable[Trajectory],
    *,
    title: str,
    most: int = 1000,
    overview: Callable[[Collection[str]], str] | None = None,
    style: str = "",
) -> str:
    """The page. Of more than ``most`` episodes it shows the first, and says how many were left out.

    ``overview`` is given the ids of those it shows, and makes markup, with ``style`` for it, that is shown until an
    episode is chosen: an element with the id ``overview``.
    """
    index: list[dict[str, Any]] = []
    blocks: list[str] = []
    left_out = 0
    for trajectory in trajectories:
        if len(index) >= most:
            left_out += 1
            continue
        blocks.append(_block(f"episode-{len(index)}", _episode(trajectory)))
        index.append(_row(trajectory))
    told = overview({row["id"] for row in index}) if overview is not None else ""
    return "".join(_parts(title, told, style, [_block("index", {"rows": index, "leftOut": left_out}), *blocks]))


def _parts(title: str, overview: str, more_style: str, blocks: list[str]) -> Iterator[str]:
    # The data goes in last: nothing that it says can be taken for a part of the page.
    style, script = _file("page.css") + more_style, _file("page.js")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    before, after = _file("page.html").split("<!-- data -->")
    for name, value in (("policy", policy), ("style", style), ("title", escape(title)), ("overview", overview)):
        before = before.replace(f"<!-- {name} -->", value)
    yield before
    yield from blocks
    yield after.replace("<!-- script -->", script)


@cache
def _file(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _block(name: str, value: Any) -> str:
    return f'<script type="application/json" id="{name}">{to_json(value).decode().translate(_ESCAPES)}</script>\n'


def _row(of: Trajectory) -> dict[str, Any]:
    """What the list shows of an episode, and is searched for."""
    outcome = of.outcome
    row: dict[str, Any] = {
        "id": of.id,
        "env": of.env,
        "task": of.task.id,
        "group": of.group or of.task.id,
        "sample": of.sample,
        "seconds": of.seconds.get("total"),
        "turns": len(of.turns),
        "ended": of.ended,
        "text": of.task.instruction[:_SEARCHED],
    }
    if isinstance(outcome, Scored):
        return row | {"score": outcome.score}
    return row | {"kind": outcome.kind, "reason": outcome.reason[:_SEARCHED]}


def _episode(of: Trajectory) -> dict[str, Any]:
    raw = _short(msgspec.to_builtins(of))
    for turn in raw["turns"]:
        if generation := turn.get("generation"):
            generation.pop("tokens", None)  # ids by the ten thousand, which only a program reads
    return {"trajectory": raw, "steps": [step._asdict() for step in steps(of)]}


def _short(value: Any, depth: int = 0) -> Any:
    """The same value with its long texts cut."""
    if depth > DEEPEST:
        return "... and more below, which is in the file"
    if isinstance(value, dict):
        is_image = value.get("type") == "image"
        return {
            name: _image(part) if _holds_image(name, part, is_image) else _short(part, depth + 1)
            for name, part in value.items()
        }
    if isinstance(value, list):
        return [_short(part, depth + 1) for part in value]
    left = len(value) - LONGEST_TEXT if isinstance(value, str) else 0
    return value if left <= 0 else f"{value[:LONGEST_TEXT]}\n... and {left:,} more characters, which are in the file"


def _holds_image(name: str, value: Any, is_image: bool) -> bool:
    return isinstance(value, str) and ((is_image and name == "data") or value.startswith("data:image/"))


def _image(data: str) -> str:
    return data if len(data) <= LARGEST_IMAGE else ""
