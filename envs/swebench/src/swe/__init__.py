"""Rows of SWE-bench, the place they are worked on, and the verdict of the benchmark's harness."""
