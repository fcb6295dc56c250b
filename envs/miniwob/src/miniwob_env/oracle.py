"""What solves each task: calls of the agent's own tools, worked out from what an agent can see as well."""

import re
from collections.abc import Callable
from typing import Any

from miniwob_env.page import Element, Page

Steps = list[dict[str, Any]]


class Seen:
    """A page as it is when its task begins."""

    def __init__(self, goal: str, elements: list[Element]) -> None:
        self.goal = goal
        self.elements = elements

    def said(self, pattern: str) -> str:
        """The part of the goal that a pattern marks."""
        found = re.search(pattern, self.goal)
        if found is None:
            raise LookupError(f"the goal is not of the form {pattern}: {self.goal}")
        return found[1]

    def all(self, *tags: str) -> list[Element]:
        return [element for element in self.elements if element.tag in tags]

    def one(self, tag: str, text: str = "") -> Element:
        """The first element with that tag, and with that text where one is given."""
        for element in self.all(tag):
            if text in ("", element.text):
                return element
        raise LookupError(f"the page has no {tag} {text!r}")

    def by_id(self, id: str) -> Element:
        return next(element for element in self.elements if element.id == id)

    def labelled(self, tag: str) -> list[tuple[str, Element]]:
        """The text beside each element with that tag, and the element."""
        pairs = zip(self.elements, self.elements[1:], strict=False)
        return [(after.text, element) for element, after in pairs if element.tag == tag]


def click(element: Element) -> dict[str, Any]:
    return {"name": "click_element", "arguments": {"ref": element.ref}}


def enter(element: Element, text: str) -> Steps:
    return [click(element), {"name": "type_text", "arguments": {"text": text}}]


def submit(seen: Seen, text: str = "Submit") -> Steps:
    return [click(seen.one("button", text))]


def answer(seen: Seen, text: str) -> Steps:
    """Write something into the only field, and submit it."""
    return enter(seen.one("input_text"), text) + submit(seen)


def quoted(seen: Seen) -> str:
    return seen.said('"(.+?)"')


def boxes(seen: Seen) -> Steps:
    wanted = seen.said(r"^Select (.+) and click Submit").split(", ")
    return [click(box) for name, box in seen.labelled("input_checkbox") if name in wanted] + submit(seen)


def option(seen: Seen) -> Steps:
    wanted = seen.said(r"^Select (.+) and click Submit")
    return [click(dict(seen.labelled("input_radio"))[wanted]), *submit(seen)]


def dialog(seen: Seen) -> Steps:
    wanted = quoted(seen)
    return [click(seen.one("button", "" if wanted == "x" else wanted))]  # the first one has an x for its text


def widget(seen: Seen) -> Steps:
    wanted = quoted(seen)
    tag = wanted if wanted in {"textarea", "button"} else f"input_{wanted}"
    return [click(seen.one(tag))]


def focus(seen: Seen) -> Steps:
    return [click(seen.all("input_text")[int(seen.said(r"the (\d)")) - 1])]


def other_case(seen: Seen) -> Steps:
    text = quoted(seen)
    return answer(seen, text.upper() if "upper case" in seen.goal else text.lower())


def password(seen: Seen) -> Steps:
    return [step for field in seen.all("input_password") for step in enter(field, quoted(seen))] + submit(seen)


def login(seen: Seen) -> Steps:
    user, word = re.findall('"(.+?)"', seen.goal)
    return (
        enter(seen.one("input_text"), user)
        + enter(seen.one("input_password"), word)
        + [click(seen.one("button", "Login"))]
    )


def listed(seen: Seen) -> Steps:
    chosen = {"ref": seen.one("select").ref, "option": seen.said(r"^Select (.+) from the list")}
    return [{"name": "select_option", "arguments": chosen}, *submit(seen)]


def arithmetic(seen: Seen) -> Steps:
    first, sign, second = seen.by_id("math-problem").text.split()[:3]
    a, b = int(first), int(second)
    return answer(seen, str({"+": a + b, "-": a - b, "x": a * b}[sign]))


def algebra(seen: Seen) -> Steps:
    first, sign, second, _, result = seen.by_id("math-problem").text.split()
    if sign == "+":
        found = int(result) - int(second if first == "x" else first)
    else:
        found = int(result) + int(second) if first == "x" else int(first) - int(result)
    return answer(seen, str(found))


def table(seen: Seen) -> Steps:
    cells = [cell.text for cell in seen.all("td")]
    return answer(seen, dict(zip(cells[::2], cells[1::2], strict=True))[seen.said("the value of (.+) into")])


def middle(element: Element) -> tuple[int, int]:
    return round(element.left + element.width / 2), round(element.top + element.height / 2)


def drag(seen: Seen) -> Steps:
    (x, y), (to_x, to_y) = middle(seen.by_id("draggableSmall")), middle(seen.by_id("draggableLarge"))
    return [{"name": "drag", "arguments": {"x": x, "y": y, "to_x": to_x, "to_y": to_y}}, *submit(seen)]


def scroll(seen: Seen) -> Steps:
    x, y = middle(seen.one("textarea"))
    down = 5000 if "to the bottom" in seen.goal else -5000
    return [{"name": "scroll", "arguments": {"x": x, "y": y, "down": down}}, *submit(seen)]


SOLVERS: dict[str, Callable[[Seen], Steps]] = {
    "choose-list": listed,
    "click-button": lambda seen: [click(seen.one("button", quoted(seen)))],
    "click-button-sequence": lambda seen: [click(seen.one("button", "ONE")), click(seen.one("button", "TWO"))],
    "click-checkboxes": boxes,
    "click-checkboxes-large": boxes,
    "click-collapsible-nodelay": lambda seen: [click(seen.one("h3")), *submit(seen)],
    "click-dialog": lambda seen: [click(seen.one("button"))],
    "click-dialog-2": dialog,
    "click-link": lambda seen: [click(seen.one("span", quoted(seen)))],
    "click-option": option,
    "click-tab": lambda seen: [click(seen.one("a", seen.said(r"(Tab #\d)")))],
    "click-test": lambda seen: [click(seen.one("button"))],
    "click-test-2": lambda seen: [click(seen.one("button", "ONE"))],
    "click-widget": widget,
    "drag-box": drag,
    "enter-password": password,
    "enter-text": lambda seen: answer(seen, quoted(seen)),
    "enter-text-2": other_case,
    "focus-text-2": focus,
    "grid-coordinate": lambda seen: [click(seen.by_id(seen.said(r"(\(.+\))")))],
    "login-user": login,
    "read-table": table,
    "scroll-text-2": scroll,
    "simple-algebra": algebra,
    "simple-arithmetic": arithmetic,
}
"""The tasks of this environment, each with what solves it."""


def solve(page: Page) -> Steps:
    return SOLVERS[page.task](Seen(page.goal, page.elements()))
