"""Durations as text, in seconds.

A duration is one or more pairs of a whole number and a unit, with nothing between them: d, h, m or s, in this order,
each unit once at most.
"""

import re
import sys

UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def seconds(text):
    total = 0
    for number, unit in re.findall(r"(\d)([dhms])", text):
        total += int(number) * UNITS[unit]
    return total


if __name__ == "__main__":
    print(seconds(sys.argv[1]))
