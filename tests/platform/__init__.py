"""Tests of a whole platform."""
# ruff: noqa: A005 - of these tests, not of the standard library
