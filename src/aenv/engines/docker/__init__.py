"""The engine on containers: Docker, and Podman, which speaks the same API."""
