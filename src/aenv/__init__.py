"""AEnvironment: write an environment once, run it anywhere.

Every public name is here, and each loads on first use: ``import aenv`` costs next to nothing.
"""

TYPE_CHECKING = False  # typing itself would be half of the cost of importing this package
if TYPE_CHECKING:
    from typing import Any

    from aenv.client.environment import Environment as Environment
    from aenv.client.lineage import Forked as Forked
    from aenv.client.lineage import Siblings as Siblings
    from aenv.client.provision import attach as attach
    from aenv.client.sync import SyncEnvironment as SyncEnvironment
    from aenv.client.vendors import anthropic_tools as anthropic_tools
    from aenv.client.vendors import gemini_tools as gemini_tools
    from aenv.client.vendors import openai_tools as openai_tools
    from aenv.errors import (
        Abandoned as Abandoned,
    )
    from aenv.errors import (
        AEnvError as AEnvError,
    )
    from aenv.errors import (
        AgentError as AgentError,
    )
    from aenv.errors import (
        AuthorError as AuthorError,
    )
    from aenv.errors import (
        CallTimeout as CallTimeout,
    )
    from aenv.errors import (
        Conflict as Conflict,
    )
    from aenv.errors import (
        Diverged as Diverged,
    )
    from aenv.errors import (
        EnvironmentError as EnvironmentError,
    )
    from aenv.errors import (
        EpisodeError as EpisodeError,
    )
    from aenv.errors import (
        EpisodeTimeout as EpisodeTimeout,
    )
    from aenv.errors import (
        Expired as Expired,
    )
    from aenv.errors import (
        Forbidden as Forbidden,
    )
    from aenv.errors import (
        Invalid as Invalid,
    )
    from aenv.errors import (
        InvalidConfig as InvalidConfig,
    )
    from aenv.errors import (
        ModelError as ModelError,
    )
    from aenv.errors import (
        NetworkError as NetworkError,
    )
    from aenv.errors import (
        NotFound as NotFound,
    )
    from aenv.errors import (
        NotServed as NotServed,
    )
    from aenv.errors import (
        OutOfMemory as OutOfMemory,
    )
    from aenv.errors import (
        RateLimited as RateLimited,
    )
    from aenv.errors import (
        SandboxError as SandboxError,
    )
    from aenv.errors import (
        SandboxLost as SandboxLost,
    )
    from aenv.errors import (
        StartFailed as StartFailed,
    )
    from aenv.errors import (
        StorageFull as StorageFull,
    )
    from aenv.errors import (
        TooLarge as TooLarge,
    )
    from aenv.errors import (
        ToolError as ToolError,
    )
    from aenv.errors import (
        ToolTimeoutError as ToolTimeoutError,
    )
    from aenv.errors import (
        TurnTimeout as TurnTimeout,
    )
    from aenv.errors import (
        Unauthorized as Unauthorized,
    )
    from aenv.errors import (
        UnrecoverableEnvironmentError as UnrecoverableEnvironmentError,
    )
    from aenv.errors import (
        Unsupported as Unsupported,
    )
    from aenv.models import (
        Audio as Audio,
    )
    from aenv.models import (
        ExecResult as ExecResult,
    )
    from aenv.models import (
        Image as Image,
    )
    from aenv.models import (
        ToolResult as ToolResult,
    )
    from aenv.runtime.context import Context as Context
    from aenv.runtime.conversations import Conversation as Conversation
    from aenv.runtime.registry import (
        register_agent as register_agent,
    )
    from aenv.runtime.registry import (
        register_function as register_function,
    )
    from aenv.runtime.registry import (
        register_health as register_health,
    )
    from aenv.runtime.registry import (
        register_load as register_load,
    )
    from aenv.runtime.registry import (
        register_reset as register_reset,
    )
    from aenv.runtime.registry import (
        register_reward as register_reward,
    )
    from aenv.runtime.registry import (
        register_save as register_save,
    )
    from aenv.runtime.registry import (
        register_setup as register_setup,
    )
    from aenv.runtime.registry import (
        register_teardown as register_teardown,
    )
    from aenv.runtime.registry import (
        register_tool as register_tool,
    )
    from aenv.runtime.registry import (
        register_turn as register_turn,
    )

__version__ = "0.1.0"

_HOME = {
    "aenv.client.environment": ("Environment",),
    "aenv.client.lineage": ("Forked", "Siblings"),
    "aenv.client.provision": ("attach",),
    "aenv.client.sync": ("SyncEnvironment",),
    "aenv.client.vendors": ("anthropic_tools", "gemini_tools", "openai_tools"),
    "aenv.errors": (
        "AEnvError",
        "Abandoned",
        "AgentError",
        "AuthorError",
        "CallTimeout",
        "Conflict",
        "Diverged",
        "EnvironmentError",
        "EpisodeError",
        "EpisodeTimeout",
        "Expired",
        "Forbidden",
        "Invalid",
        "InvalidConfig",
        "ModelError",
        "NetworkError",
        "NotFound",
        "NotServed",
        "OutOfMemory",
        "RateLimited",
        "SandboxError",
        "SandboxLost",
        "StartFailed",
        "StorageFull",
        "TooLarge",
        "ToolError",
        "ToolTimeoutError",
        "TurnTimeout",
        "Unauthorized",
        "UnrecoverableEnvironmentError",
        "Unsupported",
    ),
    "aenv.models": ("Audio", "ExecResult", "Image", "ToolResult"),
    "aenv.runtime.context": ("Context",),
    "aenv.runtime.conversations": ("Conversation",),
    "aenv.runtime.registry": (
        "register_agent",
        "register_function",
        "register_health",
        "register_load",
        "register_turn",
        "register_reset",
        "register_reward",
        "register_save",
        "register_setup",
        "register_teardown",
        "register_tool",
    ),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = ["__version__", *_MODULE_OF]  # noqa: PLE0604 - names, all of them strings


def __getattr__(name: str) -> "Any":
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'aenv' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
