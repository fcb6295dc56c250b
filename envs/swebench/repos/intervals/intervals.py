"""Intervals of numbers: pairs of a start and an end that is not a part of it."""

Interval = tuple[float, float]


def merge(found: list[Interval]) -> list[Interval]:
    """The same numbers in as few intervals as there can be, in order."""
    merged: list[Interval] = []
    for start, end in sorted(found):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def total(found: list[Interval]) -> float:
    """How much they cover; what several cover counts once."""
    return sum(end - start for start, end in merge(found))


def gaps(found: list[Interval], within: Interval) -> list[Interval]:
    """What is left of an interval."""
    free: list[Interval] = []
    at = within[0]
    for start, end in merge(found):
        if start > at:
            free.append((at, start))
        at = end
    if at < within[1]:
        free.append((at, within[1]))
    return free
