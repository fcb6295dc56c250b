"""A page of the benchmark in the browser: begun by a seed, seen, acted on, and asked for its reward."""

import base64
import importlib.metadata
import importlib.util
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from miniwob_env.browser import HEIGHT, WIDTH, Browser, PageError

VERSION = importlib.metadata.version("miniwob")
AREA = (160, 210)
"""The part of the window that is the task, as the benchmark has it; beside it are a clock and the last reward."""
_AWAY = (WIDTH - 1, HEIGHT - 1)
"""Where the mouse is when nobody has moved it: on nothing."""
_FOREVER = 2**31 - 1
"""The longest time that a page can wait for, in milliseconds: the clock of an episode never ends it."""

_BEGIN = """(async (seed, forever, mark) => {
  if (document.readyState !== "complete") await new Promise(done => addEventListener("load", () => setTimeout(done)));
  core.EPISODE_MAX_TIME = forever;
  core.countdownTimer = () => {};
  core.setDataMode("train");
  Math.seedrandom(seed);
  core.startEpisodeReal();
  core.cover_div.onclick = null;
  window.aenvMark = mark;
  return core.getUtterance();
})"""
_STATE = """(mark => window.aenvMark === mark
  ? {done: WOB_DONE_GLOBAL, raw_reward: WOB_RAW_REWARD_GLOBAL, reason: WOB_REWARD_REASON ?? ""} : null)"""
_ELEMENTS = """(() => {
  const tree = core.getDOMInfo();
  const complete = info => {
    const element = core.previousDOMInfo[info.ref];
    if (element instanceof HTMLSelectElement) {
      info.options = Array.from(element.options, option => option.text);
      info.value = element.selectedIndex < 0 ? "" : element.options[element.selectedIndex].text;
    }
    if (typeof info.classes !== "string") info.classes = "";
    info.children.forEach(complete);
  };
  complete(tree);
  return tree;
})()"""
_POINT = """(ref => {
  const element = core.previousDOMInfo[ref];
  if (!element || !element.isConnected) return {problem: "is not on the page"};
  element.scrollIntoView({block: "nearest", inline: "nearest", behavior: "instant"});
  const shares = [0.5, 0.25, 0.75, 0.1, 0.9];
  for (const box of element.getClientRects())
    for (const down of shares)
      for (const right of shares) {
        const x = box.left + box.width * right, y = box.top + box.height * down;
        const hit = document.elementFromPoint(x, y);
        if (hit && element.contains(hit)) return {x, y};
      }
  return {problem: "cannot be seen, or others cover it"};
})"""
_CHOOSE = """((ref, text) => {
  const element = core.previousDOMInfo[ref];
  if (!(element instanceof HTMLSelectElement) || !element.isConnected) return "is no list to choose from";
  const index = Array.from(element.options, option => option.text).indexOf(text);
  if (index < 0) return "has no such option";
  element.focus();
  element.selectedIndex = index;
  for (const kind of ["input", "change"]) element.dispatchEvent(new Event(kind, {bubbles: true}));
  return "";
})"""


class Key(NamedTuple):
    """A key that is not a character."""

    code: int
    text: str = ""
    commands: tuple[str, ...] = ()
    """What the browser is to do besides, in the words of its editor: a page without a window has no shortcuts."""


KEYS = {
    "Enter": Key(13, "\r"),
    "Tab": Key(9),
    "Space": Key(32, " "),
    "Backspace": Key(8),
    "Delete": Key(46),
    "Escape": Key(27),
    "ArrowLeft": Key(37),
    "ArrowUp": Key(38),
    "ArrowRight": Key(39),
    "ArrowDown": Key(40),
    "Home": Key(36),
    "End": Key(35),
    "PageUp": Key(33),
    "PageDown": Key(34),
    "Control+A": Key(65, commands=("selectAll",)),
}


class Element(NamedTuple):
    """What can be seen of an element, or of a text beside others."""

    ref: int
    """Below zero for a text, which cannot be clicked by its ref."""
    tag: str
    id: str
    classes: str
    text: str
    value: str | bool | None
    options: list[str]
    left: float
    top: float
    width: float
    height: float
    depth: int


def _flat(info: dict[str, Any], depth: int = 0) -> Iterator[Element]:
    box = (info["left"], info["top"], info["width"], info["height"])
    known = (info.get(name, default) for name, default in (("id", ""), ("classes", ""), ("text", ""), ("value", None)))
    yield Element(info["ref"], info["tag"].lower(), *known, info.get("options", []), *box, depth)
    for child in info["children"]:
        yield from _flat(child, depth + 1)


def folder() -> Path:
    """Where the pages are; found without an import of the package, which needs what is not installed."""
    found = importlib.util.find_spec("miniwob")
    if found is None or not found.submodule_search_locations:
        raise PageError("the package miniwob is not installed", hint="pip install --no-deps miniwob")
    return Path(found.submodule_search_locations[0], "html", "miniwob")


class Page:
    """An episode: one page from its beginning to its reward."""

    def __init__(self, browser: Browser, task: str, seed: int) -> None:
        self.browser = browser
        self.task = task
        self.seed = seed
        self._mark = secrets.token_hex(8)
        self._mouse("mouseMoved", *_AWAY)
        answer = browser.call("Page.navigate", url=(folder() / f"{task}.html").as_uri())
        if "errorText" in answer:
            raise PageError(f"the page of {task} cannot be loaded: {answer['errorText']}")
        arguments = ", ".join(json.dumps(value) for value in (seed, _FOREVER, self._mark))
        self.goal = str(browser.evaluate(f"{_BEGIN}({arguments})"))
        self.elements()

    def state(self) -> dict[str, Any]:
        """Whether the page says that the task is over, its reward without the clock, and what it says of it.

        A page that was left has no reward any more: what a new one says is about another episode.
        """
        found = self.browser.evaluate(f"{_STATE}({json.dumps(self._mark)})")
        return dict(found) if found else {"done": True, "raw_reward": 0.0, "reason": "the page was left"}

    def elements(self) -> list[Element]:
        """What is on the page, each element before those inside it."""
        return list(_flat(self.browser.evaluate(_ELEMENTS)))

    def screenshot(self) -> bytes:
        """The task as a PNG."""
        clip = {"x": 0, "y": 0, "width": AREA[0], "height": AREA[1], "scale": 1}
        return base64.b64decode(self.browser.call("Page.captureScreenshot", format="png", clip=clip)["data"])

    def point_of(self, ref: int) -> tuple[float, float] | str:
        """Where an element can be clicked, once it is scrolled to; else why it cannot."""
        found = self.browser.evaluate(f"{_POINT}({ref:d})")
        return str(found["problem"]) if "problem" in found else (found["x"], found["y"])

    def choose(self, ref: int, option: str) -> str:
        """Choose from a list. Returns what hinders that, or nothing."""
        return str(self.browser.evaluate(f"{_CHOOSE}({ref:d}, {json.dumps(option)})"))

    def click(self, x: float, y: float) -> None:
        self._mouse("mouseMoved", x, y)
        self._mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
        self._mouse("mouseReleased", x, y, button="left", clickCount=1)

    def drag(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self._mouse("mouseMoved", x, y)
        self._mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
        for part in (0.25, 0.5, 0.75, 1.0):
            self._mouse("mouseMoved", x + (to_x - x) * part, y + (to_y - y) * part, button="left", buttons=1)
        self._mouse("mouseReleased", to_x, to_y, button="left", clickCount=1)

    def scroll(self, x: float, y: float, down: float) -> None:
        self._mouse("mouseMoved", x, y)
        self._mouse("mouseWheel", x, y, deltaX=0, deltaY=down)
        # A wheel is answered before the page is drawn at its new place.
        self.browser.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))")

    def type(self, text: str) -> None:
        for character in text:
            if character == "\n":
                self.press("Enter")
                continue
            call = self.browser.call
            call("Input.dispatchKeyEvent", type="keyDown", key=character, text=character, unmodifiedText=character)
            call("Input.dispatchKeyEvent", type="keyUp", key=character)

    def press(self, name: str) -> None:
        code, text, commands = KEYS[name]
        key = {"key": " " if name == "Space" else name.rpartition("+")[2], "windowsVirtualKeyCode": code}
        if name.startswith("Control+"):
            key |= {"key": key["key"].lower(), "modifiers": 2}
        down = {"text": text, "unmodifiedText": text} if text else {}
        kind = "keyDown" if text else "rawKeyDown"
        self.browser.call("Input.dispatchKeyEvent", type=kind, **key, **down, commands=list(commands))
        self.browser.call("Input.dispatchKeyEvent", type="keyUp", **key)

    def _mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
