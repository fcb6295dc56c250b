"""A hundred tools."""

from aenv import register_tool


@register_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


for number in range(1, 100):

    @register_tool(name=f"add_{number}")
    def add_more(a: int, b: int) -> int:
        """Add two numbers, too."""
        return a + b
