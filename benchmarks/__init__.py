"""How fast AEnvironment is, measured beside its peers in the same run: ``python -m benchmarks``."""
