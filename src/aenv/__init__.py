"""AEnvironment: write an environment once, run it anywhere.

Every public name is here, and each loads on first use: ``import aenv`` costs next to nothing.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aenv.client.environment import Environment, attach
    from aenv.client.sync import SyncEnvironment
    from aenv.errors import (
        AEnvError,
        AuthorError,
        CallTimeout,
        Conflict,
        EnvironmentError,
        Forbidden,
        Invalid,
        InvalidConfig,
        NetworkError,
        NotFound,
        RateLimited,
        SandboxError,
        SandboxLost,
        StartFailed,
        ToolError,
        TooLarge,
        ToolTimeoutError,
        Unauthorized,
        UnrecoverableEnvironmentError,
        Unsupported,
    )
    from aenv.models import Audio, Image, ToolResult
    from aenv.runtime.context import Context
    from aenv.runtime.registry import (
        register_agent,
        register_function,
        register_health,
        register_reset,
        register_reward,
        register_setup,
        register_teardown,
        register_tool,
    )

__version__ = "0.1.0"

_HOME = {
    "aenv.client.environment": ("Environment", "attach"),
    "aenv.client.sync": ("SyncEnvironment",),
    "aenv.errors": (
        "AEnvError",
        "AuthorError",
        "CallTimeout",
        "Conflict",
        "EnvironmentError",
        "Forbidden",
        "Invalid",
        "InvalidConfig",
        "NetworkError",
        "NotFound",
        "RateLimited",
        "SandboxError",
        "SandboxLost",
        "StartFailed",
        "ToolError",
        "ToolTimeoutError",
        "TooLarge",
        "Unauthorized",
        "UnrecoverableEnvironmentError",
        "Unsupported",
    ),
    "aenv.models": ("Audio", "Image", "ToolResult"),
    "aenv.runtime.context": ("Context",),
    "aenv.runtime.registry": (
        "register_agent",
        "register_function",
        "register_health",
        "register_reset",
        "register_reward",
        "register_setup",
        "register_teardown",
        "register_tool",
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = ["__version__", *_MODULE_OF]  # noqa: PLE0604 - names, all of them strings


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'aenv' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
