"""What a program in a sandbox is told of its only way out."""

from __future__ import annotations

from collections.abc import Iterable

from aenv.engines.process.seal import PROXY_PORT

ADDRESS = f"127.0.0.1:{PROXY_PORT}"
"""Where the proxy is, inside."""


def variables(allowed: Iterable[str]) -> dict[str, str]:
    """What tells a program where its proxy is. What is allowed out there is not looked for in here."""
    listed = {address.rpartition(":")[0].strip("[]") for address in allowed}
    own = ",".join(name for name in ("localhost", "127.0.0.1", "::1") if name not in listed)
    names = ("http_proxy", "https_proxy", "all_proxy")
    return {spelling: f"http://{ADDRESS}" for name in names for spelling in (name, name.upper())} | {
        "no_proxy": own,
        "NO_PROXY": own,
    }
