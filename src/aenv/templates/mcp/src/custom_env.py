"""An MCP server as an environment: the sandbox serves it at /mcp as it is, with a reward beside it.

To wrap a server that exists already, replace the part between the lines by an import of it:
``from your_package import server``. Any FastMCP object at the top of a module is found.
"""

from aenv import register_reward

try:
    from fastmcp import FastMCP
except ImportError:
    from mcp.server import MCPServer as FastMCP

# ---------------------------------------------------------------------------------------------

server = FastMCP("{{name}}")
notes: dict[str, str] = {}


def write_note(title: str, text: str) -> str:
    """Keep a note under a title, in place of an older one."""
    notes[title] = text
    return f"kept {title!r}"


def read_note(title: str) -> str:
    """Return the note of that title."""
    if title not in notes:
        raise ValueError(f"there is no note {title!r}; titles: {sorted(notes)}")
    return notes[title]


# Called as functions, so that the tests below test/ can call the plain functions too.
server.tool()(write_note)
server.tool()(read_note)

# ---------------------------------------------------------------------------------------------


@register_reward
def note_contains(title: str, expected: str) -> float:
    """1.0 when the note of that title holds the expected text, else 0.0.

    Args:
        title: Which note.
        expected: Text that it should hold.
    """
    return 1.0 if expected in notes.get(title, "") else 0.0
