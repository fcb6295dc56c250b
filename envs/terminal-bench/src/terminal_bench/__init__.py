"""Tasks as Harbor writes them, run in the second container."""
