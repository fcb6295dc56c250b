"""The data port: requests passed on to the sandbox that they name, as they come."""

from aenv.api.gateway.gateway import Gateway
from aenv.api.gateway.places import Answered, Directory, Place, Replicas, Services, Watcher

__all__ = ["Answered", "Directory", "Gateway", "Place", "Replicas", "Services", "Watcher"]
