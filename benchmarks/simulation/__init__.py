"""Thousands of pods on a real API server, of which none runs: a scripted node says that they do."""
