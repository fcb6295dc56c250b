"""The agent under test: the desk of a library, which may be given a fault."""

import re

from aenv import Conversation, Invalid, register_agent, register_function, register_reset

LOANS = {"K11": ("Ada", "Monday"), "K12": ("Bob", "Friday"), "K13": ("Eve", "Sunday")}
FAULTS = ("none", "tells anybody", "forgets", "makes things up")
now = {"fault": "none"}


@register_agent
def desk(message: str, conversation: Conversation) -> str:
    """The desk of a library. It tells when a book is due, and only to who has it.

    Args:
        message: What a reader says.
    """
    known = {} if now["fault"] == "forgets" else conversation.state
    if name := re.search(r"\b(?:I am|I'm) (\w+)", message):
        known["name"] = name[1]
    if book := re.search(r"\bK\d\d\b", message):
        known["book"] = book[0]
    if "book" not in known:
        return "Which book is it? Its number is a K and two digits."
    if "name" not in known and now["fault"] != "tells anybody":
        return "Who are you, please?"
    if known["book"] not in LOANS:
        return "It is due on Tuesday." if now["fault"] == "makes things up" else "I know no such book."
    reader, day = LOANS[known["book"]]
    if known.get("name") != reader and now["fault"] != "tells anybody":
        return "That is somebody else's."
    return f"It is due on {day}."


@register_function
def give_fault(fault: str) -> None:
    """From now on there is one. Whoever talks to the desk cannot call this."""
    if fault not in FAULTS:
        raise Invalid(f"there is no fault {fault!r}", hint=f"use one of {', '.join(FAULTS)}")
    now["fault"] = fault


@register_reset
def mend() -> None:
    now["fault"] = "none"
