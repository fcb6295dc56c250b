"""Where the agent comes from: the wheel, the cache, or a compiler."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from aenv import agent
from aenv.agent import recipe
from aenv.errors import Unsupported

HERE = platform.machine()
needs_compiler = pytest.mark.skipif(
    recipe.compiler(HERE) is None, reason="no C compiler (on Debian: apt install gcc libc6-dev)"
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AENV_HOME", str(tmp_path / "home"))
    sources = tmp_path / "sources"
    sources.mkdir()
    for file in Path(agent.__file__).parent.glob("*.[ch]"):
        shutil.copy(file, sources)
    monkeypatch.setattr(agent, "_HERE", sources)
    return sources


@needs_compiler
def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = agent.binary()
    assert first.stat().st_mode & 0o777 == 0o755
    assert b"INTERP" not in _headers(first)
    monkeypatch.setenv("PATH", "/nowhere")
    assert agent.binary() == first
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def _headers(program: Path) -> bytes:
    if shutil.which("readelf") is None:
        pytest.skip("no readelf (on Debian: apt install binutils)")
    return subprocess.run(["readelf", "-lW", program], capture_output=True, check=True).stdout


@needs_compiler
def test_another_source_is_another_program(home: Path) -> None:
    first = agent.binary()
    (home / "agent.h").write_text((home / "agent.h").read_text() + "\n")
    assert agent.binary() != first


def test_one_that_is_shipped_is_taken(home: Path) -> None:
    (home / "bin").mkdir()
    shipped = home / "bin" / "aenv-agent-aarch64"
    shipped.touch()
    assert agent.binary("arm64") == agent.binary("aarch64") == agent.binary("ARM64") == shipped


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Unsupported, match="no compiler") as caught:
        agent.binary()
    assert "apt install gcc libc6-dev" in str(caught.value.hint)
    with pytest.raises(Unsupported) as caught:
        agent.binary("riscv64")
    assert "apt install gcc-riscv64-linux-gnu" in str(caught.value.hint)


@needs_compiler
def test_a_compiler_that_fails_is_quoted(home: Path) -> None:
    (home / "agent.h").write_text("#error broken\n")
    with pytest.raises(Unsupported, match="#error broken"):
        agent.binary()


@pytest.mark.skipif(
    recipe.compiler("aarch64") is None, reason="no compiler for ARM (on Debian: apt install gcc-aarch64-linux-gnu)"
)
def test_arm() -> None:
    assert agent.binary("arm64").read_bytes()[18:20] == b"\xb7\0"
