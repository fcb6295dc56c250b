"""The data port: requests passed on to the sandbox that they name, as they come."""

from aenv.api.gateway.gateway import Gateway
from aenv.api.gateway.places import Directory, Place

__all__ = ["Directory", "Gateway", "Place"]
