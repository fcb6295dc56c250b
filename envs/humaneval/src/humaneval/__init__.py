"""Programs of the agent's, run where the benchmark's answers cannot be read, and judged."""
