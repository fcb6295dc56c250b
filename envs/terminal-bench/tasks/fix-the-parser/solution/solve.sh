#!/bin/bash
cat > /app/durations.py <<'END'
"""Durations as text, in seconds.

A duration is one or more pairs of a whole number and a unit, with nothing between them: d, h, m or s, in this order,
each unit once at most.
"""

import re
import sys

FORM = re.compile(r"(?:([0-9]+)d)?(?:([0-9]+)h)?(?:([0-9]+)m)?(?:([0-9]+)s)?")


def seconds(text):
    found = FORM.fullmatch(text)
    if not text or not found:
        raise ValueError(text)
    return sum(int(number or 0) * unit for number, unit in zip(found.groups(), (86400, 3600, 60, 1)))


if __name__ == "__main__":
    try:
        print(seconds(sys.argv[1]))
    except ValueError:
        print("invalid")
        sys.exit(1)
END
