"""What a docstring says about a function and its arguments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.runtime.docstrings import parse

GOOGLE = """Move a file.

    Nothing is overwritten.

    Args:
        source: where it is
            and where it was
        target (str, optional): where it goes: a path
        mode (dict[str, (int)]): nested brackets
        tight(int): no space before the type

        *rest: after a blank line
        **more: everything else

    Returns:
        source: this is not the argument
    """
NUMPY = """Move a file.

    Nothing is overwritten.

    Parameters
    ----------
    source : str
        where it is
        and where it was
    target, mode : str, optional
        shared by both
    *rest
        after that
    **more : dict
        everything else

    Returns
    -------
    source
        this is not the argument

    See Also
    --------
    target : other
    """
SPHINX = """Move a file.

    Nothing is overwritten.

    :param source: where it is
        and where it was
    :param str target: where it goes
    :parameter list[str] mode: how
    :arg rest: after that
    :type rest: int
    :returns: source
    :raises ValueError: never
    :param more:
        everything else
    """


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (
            GOOGLE,
            {
                "source": "where it is and where it was",
                "target": "where it goes: a path",
                "mode": "nested brackets",
                "tight": "no space before the type",
                "rest": "after a blank line",
                "more": "everything else",
            },
        ),
        (
            NUMPY,
            {
                "source": "where it is and where it was",
                "target": "shared by both",
                "mode": "shared by both",
                "rest": "after that",
                "more": "everything else",
            },
        ),
        (
            SPHINX,
            {
                "source": "where it is and where it was",
                "target": "where it goes",
                "mode": "how",
                "rest": "after that",
                "more": "everything else",
            },
        ),
    ],
    ids=["google", "numpy", "sphinx"],
)
def test_each_way_of_writing_is_understood(text: str, arguments: dict[str, str]) -> None:
    found = parse(text)
    assert found.description == "Move a file.\n\nNothing is overwritten."
    assert found.arguments == arguments


@pytest.mark.parametrize(
    ("text", "description", "arguments"),
    [
        (None, None, {}),
        ("", None, {}),
        ("   \n  ", None, {}),
        ("One line.", "One line.", {}),
        ("Args:\n    a: from the first line", None, {"a": "from the first line"}),
        ("Do.\n\n    Args:\n    a: not indented\n    b: nor this", "Do.", {"a": "not indented", "b": "nor this"}),
        ("Do.\n\n\tArgs:\n\t\ta: by tab", "Do.", {"a": "by tab"}),
        ("Do.\r\n\r\n    Args:\r\n        a: with CRLF\r\n", "Do.", {"a": "with CRLF"}),
        ("Do.\n\nArgs:\n    a: b\n\nNote: kept.", "Do.\n\nNote: kept.", {"a": "b"}),
        ("Do.\n\nArgs:\n    a: b\n\nTodo:\n    dropped: yes\n", "Do.", {"a": "b"}),
        ("Do.\n\nKeyword Args:\n    k: named\n\nOther Parameters:\n    z: rare", "Do.", {"k": "named", "z": "rare"}),
        ("Do.\n\nArgs:\n    a: one:\n        - x: this\n        - y: that", "Do.", {"a": "one: - x: this - y: that"}),
        ("A title\n-------\nand text", "A title\n-------\nand text", {}),
        ("What it returns: a number.", "What it returns: a number.", {}),
        ("Raises\nhands", "Raises\nhands", {}),
    ],
)  # fmt: skip
def test_odd_docstrings(text: str | None, description: str | None, arguments: dict[str, str]) -> None:
    assert parse(text) == (description, arguments)


_LINES = st.sampled_from(
    ["Args:", "Parameters", "----", "    a: b", "  *x (int): y", ":param q: z", ":returns:", "", "text", "\tb : int"]
)


@given(st.text() | st.lists(_LINES | st.text(max_size=8)).map("\n".join))
def test_no_text_breaks_it(text: str) -> None:
    found = parse(text)
    assert found.description is None or found.description == found.description.strip() != ""
    assert "" not in found.arguments
