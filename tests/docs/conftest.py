"""The daemon of containers that pages need."""

from tests.engines.docker.conftest import dockerd, ground

__all__ = ["dockerd", "ground"]
