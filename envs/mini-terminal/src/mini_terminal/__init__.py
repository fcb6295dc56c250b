"""A shell that outlives its commands, and what is needed around it. ``custom_env`` offers it as tools."""
