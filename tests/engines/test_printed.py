"""What a container printed: all of it, and asked for in small pieces where it was asked for before."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from aenv.engines.printed import Printed


class Paper:
    """What a container printed, of which a stream tells no more than was there when it began, or nothing."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.silent = False
        self.asked: list[int | None] = []
        """How many lines, each time; None is all."""

    async def last(self, lines: int | None = None) -> bytes:
        self.asked.append(lines)
        found = self.text.encode().splitlines(keepends=True)
        return b"".join(found if lines is None else found[-lines:])

    async def follow(self) -> AsyncGenerator[bytes, None]:
        if not self.silent:
            yield self.text.encode()


@pytest.fixture
async def paper() -> Paper:
    return Paper("".join(f"line {number}\n" for number in range(20_000)))


@pytest.fixture
async def printed(paper: Paper) -> AsyncIterator[Printed]:
    found = Printed(paper, None)
    yield found
    await found.close()


async def everything(printed: Printed) -> str:
    found = await printed.since(0)
    assert found.start == 0
    return found.data.decode()


async def test_one_that_is_over_is_asked_for_its_last_line_only(paper: Paper, printed: Printed) -> None:
    for _ in range(3):
        assert await everything(printed) == paper.text
    assert paper.asked == [1, 1, 1]


async def test_one_whose_stream_has_ended_is_not_fetched_whole_at_each_look(paper: Paper, printed: Printed) -> None:
    await everything(printed)
    paper.text += "more\n"
    for _ in range(3):
        assert await everything(printed) == paper.text
    paper.text += "and more\n"
    assert await everything(printed) == paper.text
    assert None not in paper.asked


async def test_what_came_in_great_numbers_since_is_fetched_whole_once(paper: Paper, printed: Printed) -> None:
    await everything(printed)
    paper.text += "".join(f"more {number}\n" for number in range(5000))
    for _ in range(3):
        assert (await everything(printed))[-100:] == paper.text[-100:]
    assert paper.asked.count(None) == 1


async def test_a_stream_that_told_nothing_is_made_up_for_once(paper: Paper, printed: Printed) -> None:
    paper.silent = True
    for _ in range(3):
        assert await everything(printed) == paper.text
    assert paper.asked.count(None) == 1


async def test_an_empty_line_at_the_end_is_not_looked_for_in_everything(paper: Paper, printed: Printed) -> None:
    paper.text += "\n"
    for _ in range(3):
        assert await everything(printed) == paper.text
    assert None not in paper.asked
