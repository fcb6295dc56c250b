"""The parts of this environment: the browser, a page of the benchmark in it, and what solves each task."""
