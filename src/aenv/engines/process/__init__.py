"""Isolated instances on this machine, forked from a warm parent in milliseconds.

Three roles. The *spawner* is trusted, small, and runs nothing of an author's. A *zygote*, one for each owner and
project, is jailed before it imports any author code. An *instance* is forked from it, seals itself, and is looked at
from outside before anybody is told where it is. ``engine`` is what a client of all this holds.
"""
