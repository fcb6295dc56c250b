"""MiniWoB++: small web pages in a real browser, and what an agent at a screen can do with them."""

import random
import threading
from typing import Any

from miniwob_env.browser import Browser
from miniwob_env.oracle import SOLVERS, solve
from miniwob_env.page import AREA, KEYS, VERSION, Element, Page

from aenv import Image, Invalid, ToolError, register_function, register_reset, register_reward, register_tool
from aenv.errors import did_you_mean

INSTRUCTION = (
    "There is a web page of 160 by 210 pixels. What is to be done on it is in the observation, and at the top of the "
    "page. Look at it with screenshot or look, act with the other tools, and go on until one says that it is done. "
    "A wrong click can end the task, and there is no second try."
)
MOST_CHARACTERS = 1000


class _Current:
    """The browser of this sandbox, which is kept, and the episode that it is in."""

    browser: Browser | None = None
    page: Page | None = None
    lock = threading.Lock()
    """Held while something is done: calls at the same time take turns."""


current = _Current()


def _page() -> Page:
    if current.page is None:
        raise Invalid("no task has begun", hint='begin one with Environment.reset(seed, {"task": ...})')
    return current.page


def _to_act() -> Page:
    """The page, while there is something to be done on it."""
    page = _page()
    if page.state()["done"]:
        raise ToolError("the task is over")
    return page


def _inside(x: float, y: float) -> None:
    width, height = AREA
    if not (0 <= x < width and 0 <= y < height):
        raise ToolError(f"({x}, {y}) is not on the page: x is from 0 to {width - 1}, y from 0 to {height - 1}")


def _after(page: Page) -> dict[str, Any]:
    return {"done": page.state()["done"]}


# What the agent sees


@register_tool
def screenshot() -> Image:
    """The page as an image. One pixel of it is one of the coordinates that click, drag and scroll take."""
    with current.lock:
        return Image(_page().screenshot())


def _line(element: Element) -> str:
    if element.ref < 0:
        return f'{"  " * element.depth}"{element.text}"'
    name = element.tag + (f"#{element.id}" if element.id else "")
    name += "".join(f".{part}" for part in element.classes.split())
    parts = [f"{'  ' * element.depth}[{element.ref}] {name}"]
    if element.text:
        parts.append(f'"{element.text}"')
    if element.value is not None:
        parts.append(f"value={str(element.value).lower() if isinstance(element.value, bool) else repr(element.value)}")
    if element.options:
        parts.append(f"options={element.options}")
    middle = (round(element.left + element.width / 2), round(element.top + element.height / 2))
    return " ".join([*parts, f"at {middle[0]},{middle[1]}"])


def _described(page: Page) -> str:
    return "\n".join([page.goal, *map(_line, page.elements())])


@register_tool
def look() -> str:
    """The page as text: what is to be done, and its elements, each with its ref in brackets and where its middle is."""
    with current.lock:
        return _described(_page())


# What the agent does


@register_tool
def click(x: float, y: float) -> dict[str, Any]:
    """Click a point of the page.

    Args:
        x: From the left, 0 to 159.
        y: From the top, 0 to 209.
    """
    with current.lock:
        page = _to_act()
        _inside(x, y)
        page.click(x, y)
        return _after(page)


@register_tool
def click_element(ref: int) -> dict[str, Any]:
    """Click an element with the mouse, and scroll to it first where that is needed.

    Args:
        ref: Its number, as look shows it.
    """
    with current.lock:
        page = _to_act()
        point = page.point_of(ref)
        if isinstance(point, str):
            raise ToolError(f"the element {ref} {point}")
        page.click(*point)
        return _after(page)


@register_tool
def select_option(ref: int, option: str) -> dict[str, Any]:
    """Choose from a list.

    Args:
        ref: The number of the select, as look shows it.
        option: The text of the option.
    """
    with current.lock:
        page = _to_act()
        if problem := page.choose(ref, option):
            raise ToolError(f"the element {ref} {problem}")
        return _after(page)


@register_tool
def drag(x: float, y: float, to_x: float, to_y: float) -> dict[str, Any]:
    """Press the mouse at one point of the page, move it to another one and release it there.

    Args:
        x: Where it is pressed, from the left.
        y: Where it is pressed, from the top.
        to_x: Where it is released, from the left.
        to_y: Where it is released, from the top.
    """
    with current.lock:
        page = _to_act()
        _inside(x, y)
        _inside(to_x, to_y)
        page.drag(x, y, to_x, to_y)
        return _after(page)


@register_tool
def scroll(x: float, y: float, down: float) -> dict[str, Any]:
    """Turn the wheel of the mouse at a point of the page.

    Args:
        x: From the left.
        y: From the top.
        down: How many pixels to scroll down; below zero to scroll up.
    """
    with current.lock:
        page = _to_act()
        _inside(x, y)
        page.scroll(x, y, down)
        return _after(page)


@register_tool
def type_text(text: str) -> dict[str, Any]:
    """Type on the keyboard, into what has the focus.

    Args:
        text: What to type; a line break is the key Enter.
    """
    if len(text) > MOST_CHARACTERS:
        raise ToolError(f"that are {len(text)} characters, and at most {MOST_CHARACTERS} can be typed at once")
    with current.lock:
        page = _to_act()
        page.type(text)
        return _after(page)


@register_tool
def press_key(key: str) -> dict[str, Any]:
    """Press one key.

    Args:
        key: Enter, Tab, Space, Backspace, Delete, Escape, ArrowLeft, ArrowUp, ArrowRight, ArrowDown, Home, End,
            PageUp, PageDown, or Control+A, which selects all of a field.
    """
    if key not in KEYS:
        raise ToolError(f"there is no key {key[:40]!r}: there are {', '.join(KEYS)}")
    with current.lock:
        page = _to_act()
        page.press(key)
        return _after(page)


# Tasks


def _known(task: str) -> str:
    if task not in SOLVERS:
        raise Invalid(f"there is no task {task[:100]!r}", hint=did_you_mean(task, SOLVERS))
    return task


@register_function
def tasks(domain: str = "all") -> dict[str, Any]:
    """The tasks.

    Args:
        domain: The name of one, or all.
    """
    names = list(SOLVERS) if domain == "all" else [_known(domain)]
    listed = [
        {"id": name, "instruction": INSTRUCTION, "reset": {"task": name}, "metadata": {"domain": name}}
        for name in names
    ]
    return {"tasks": listed, "source": {"name": "miniwob", "version": VERSION}}


@register_reset
def begin(task: str, seed: int | None = None) -> dict[str, Any]:
    """Begin a task: its page, loaded anew, with what the seed draws for it. The first one starts the browser.

    Args:
        task: Its name.
        seed: Decides all that is drawn; without one, any is taken.
    """
    with current.lock:
        current.page = None
        _known(task)
        if current.browser is None or current.browser.closed:
            current.browser = Browser()
        current.page = Page(current.browser, task, random.getrandbits(31) if seed is None else seed)
        return {"goal": current.page.goal, "page": _described(current.page)}


@register_function
def solution(task: str = "") -> list[dict[str, Any]]:
    """Calls that solve the task that has begun, worked out from the page as it is now.

    Args:
        task: Its name; without one, whichever has begun.
    """
    with current.lock:
        page = _page()
        if task and _known(task) != page.task:
            raise Invalid(f"{task!r} is not the task that has begun, which is {page.task!r}")
        return solve(page)


@register_reward
def score() -> dict[str, Any]:
    """The page's own reward: the score is 1 when it gave all of it, whatever time that took.

    Beside the score there are raw_reward, which some pages give in part and which is below zero for what is wrong,
    done, and reason, where the page gives one.
    """
    with current.lock:
        state = _page().state()
    return {"score": float(state["done"] and state["raw_reward"] == 1.0), **state}
