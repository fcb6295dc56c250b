"""Puzzles that come out the same in every process, and scores that an answer cannot get by running code."""
