"""Harbor's tasks on our engines: ``harbor run -e aenv.integrations.harbor:AenvEnvironment``.

A trial has an instance of ``terminal-bench``, and its commands run in the second container. ``AENV_ENGINE`` says where
that is. On the process engine, a task's Dockerfile is followed in this machine's programs, where that is possible; on
Docker and Kubernetes it is an image: the ``docker_image`` of its ``task.toml``, or what ``--ek images=tb/{task}:1``
says.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.definition import require_agent_environment_definition
from harbor.environments.tar_transfer import (
    extract_dir_from_bytes,
    pack_dir_to_bytes,
    remote_pack_command,
    remote_unpack_command,
)
from harbor.models.task.config import NetworkMode

from aenv import config
from aenv.client.environment import Environment
from aenv.errors import Invalid, SandboxError

PROJECT = "terminal-bench"
_DAY = 24 * 3600.0
_MARGIN = 60.0
"""Seconds that an answer may take beyond its command."""
_OWN_MEMORY = 256
"""MiB of an instance that are the runtime's, and not the task's."""
_ROOT = (None, "root", 0, "0")
_PORTS = (80, 443)
"""Of a host that a task lists."""


class AenvEnvironment(BaseEnvironment):
    """The environment of one trial, or of one verifier."""

    def __init__(self, *args: Any, images: str = "", **kwargs: Any) -> None:
        """``images``: what the images of tasks are called, with ``{task}`` in it."""
        self._images = images
        self._env: Environment | None = None
        self._workdir: str | None = None
        self._variables: dict[str, str] = {}
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "aenv"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        """A platform gives instances the network of their project; engines of this process give any."""
        here = not config.get("system_url")
        return EnvironmentCapabilities(
            disable_internet=here,
            network_allowlist=here,
            network_allowlist_hostnames=here,
            network_allowlist_wildcard_hostnames=here,
            network_allowlist_ipv4_addresses=here,
        )

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True)

    async def start(self, force_build: bool) -> None:
        image = self._image()
        wanted = Environment(PROJECT, image, ttl=_DAY, resources=self._resources())
        env = Environment.like(wanted, network=self._network()) if self._network() != "full" else wanted
        try:
            await env.initialize()
            self._env = env
            if not image:
                await self._make()
            await self.ensure_dirs(self._mount_targets(writable_only=True))
            await self._upload_environment_dir_after_start()
        except BaseException:
            await env.release()
            self._env = None
            raise

    async def stop(self, delete: bool) -> None:
        if self._env is not None:
            env, self._env = self._env, None
            await env.release()

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        if self._resolve_user(user) not in _ROOT:
            raise Invalid(f"commands run as the user of the image, and not as {self._resolve_user(user)!r}")
        limit = float(timeout_sec or _DAY)
        arguments = {
            "command": command,
            "cwd": cwd or self.task_env_config.workdir or self._workdir,
            "variables": {**self._variables, **(self._merge_env(env) or {})},
            "timeout": limit,
        }
        done = await self._running().call_function("run_command", arguments, timeout=limit + _MARGIN)
        if done["timed_out"]:
            raise TimeoutError(f"the command took longer than {limit:g} s: {command[:200]}")
        return ExecResult(stdout=done["stdout"], stderr=done["stderr"], return_code=done["returncode"])

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        path = Path(source_path)
        mode = (await asyncio.to_thread(path.stat)).st_mode & 0o777
        await self._put(await asyncio.to_thread(path.read_bytes), target_path, mode)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        packed = await asyncio.to_thread(pack_dir_to_bytes, source_dir, compress=True)
        there = _passing()
        await self._put(packed.getvalue(), there, 0o600)
        await self._done(f"{remote_unpack_command(there, target_dir)} && rm -f {shlex.quote(there)}")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        data, path = await self._get(source_path), Path(target_path)
        await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
        await asyncio.to_thread(path.write_bytes, data)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        there = _passing()
        await self._done(remote_pack_command(source_dir, there))
        data = await self._get(there)
        await asyncio.to_thread(extract_dir_from_bytes, data, target_dir)
        await self._done(f"rm -f {shlex.quote(there)}")

    def _validate_definition(self) -> None:
        require_agent_environment_definition(self.environment_dir, docker_image=self.task_env_config.docker_image)

    def _image(self) -> str:
        """The image of the second container; none when the Dockerfile is followed."""
        own: str = self.task_env_config.docker_image or ""
        return self._images.format(task=self.environment_name, image=own) if self._images else own

    def _network(self) -> str | dict[str, list[str]]:
        policy = self.network_policy
        if policy.network_mode == NetworkMode.ALLOWLIST:
            return {"allow": [f"{host}:{port}" for host in policy.allowed_hosts for port in _PORTS]}
        return "none" if policy.network_mode == NetworkMode.NO_NETWORK else "full"

    def _resources(self) -> dict[str, str]:
        found = {}
        if self._effective_cpus:
            found["cpu"] = str(self._effective_cpus)
        if self._effective_memory_mb:
            found["memory"] = f"{self._effective_memory_mb + _OWN_MEMORY}Mi"
        if self._effective_storage_mb:
            found["ephemeralStorage"] = f"{self._effective_storage_mb}Mi"
        return found

    async def _make(self) -> None:
        """Have the Dockerfile followed, by the project, in the second container."""
        env, folder = self._running(), f"made/{self.environment_name}"
        programs = []
        for path in await asyncio.to_thread(_files, self.environment_dir):
            target = f"{folder}/{path.relative_to(self.environment_dir).as_posix()}"
            await env.upload(target, path)
            if os.access(path, os.X_OK):
                programs.append(target)
        if programs and (done := await env.exec(["chmod", "+x", *programs])).returncode:
            raise SandboxError(f"the programs of {self.environment_dir} could not be made such: {done.stderr}")
        made = await env.call_function("make_environment", {"directory": folder}, timeout=_DAY)
        self._workdir, self._variables = made["workdir"], made["variables"]

    async def _put(self, data: bytes, target: str, mode: int) -> None:
        passing = f"passing/{secrets.token_hex(8)}"
        await self._running().upload(passing, data)
        await self._running().call_function("push_file", {"source": passing, "target": target, "mode": mode})

    async def _get(self, source: str) -> bytes:
        passing = f"passing/{secrets.token_hex(8)}"
        await self._running().call_function("pull_file", {"source": source, "target": passing})
        return await self._running().download(passing)

    async def _done(self, command: str) -> None:
        result = await self.exec(command, timeout_sec=600)
        if result.return_code:
            raise Invalid(f"{command} failed: {(result.stderr or result.stdout or '').strip()}")

    def _running(self) -> Environment:
        if self._env is None:
            raise Invalid("the environment is not started", hint="call start() before")
        return self._env


def _passing() -> str:
    return f"/tmp/.aenv-{secrets.token_hex(8)}.tar.gz"  # noqa: S108


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())
