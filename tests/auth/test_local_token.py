"""The token that a server on the loopback shares with its user."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aenv.auth.callers import Caller, Scope
from aenv.auth.tokens import Tokens, find_local_token, local_token
from aenv.errors import AEnvError, InvalidConfig, Unauthorized
from aenv.store import Store
from aenv.wire import TokenRequest


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "user" / "home"


async def test_it_opens_everything_where_it_is_accepted(home: Path, sqlite: Store) -> None:
    token = local_token(home)
    tokens = Tokens(sqlite, local=token)
    caller = await tokens.authenticate(token)
    assert caller == Caller("local", frozenset(Scope), "local")
    made = await tokens.create(caller, TokenRequest(owner="alice"))
    assert made.made_by == "local"
    assert (await tokens.authenticate(made.token)).owner == "alice"
    with pytest.raises(Unauthorized):
        await Tokens(sqlite).authenticate(token)


def test_it_is_made_once_and_nobody_else_can_read_it(home: Path) -> None:
    assert find_local_token(home) is None
    assert not home.exists()
    token = local_token(home)
    assert local_token(home) == find_local_token(home) == token
    assert (home / "token").stat().st_mode & 0o777 == 0o600
    assert home.stat().st_mode & 0o777 == 0o700
    assert os.listdir(home) == ["token"]


def test_all_who_make_it_at_once_get_the_same(home: Path) -> None:
    together = threading.Barrier(16)

    def make(_: int) -> str:
        together.wait(30)
        return local_token(home)

    with ThreadPoolExecutor(16) as threads:
        assert len(set(threads.map(make, range(16)))) == 1
    assert os.listdir(home) == ["token"]


def test_two_processes_get_the_same(home: Path) -> None:
    program = "import sys; from pathlib import Path; from aenv.auth.tokens import local_token as make;"
    program += "sys.stdin.read(1); print(make(Path(sys.argv[1])))"
    command = [sys.executable, "-c", program, str(home)]
    both = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        assert process.stdin is not None
        process.stdin.write("x")
        process.stdin.flush()
    printed = [process.communicate(timeout=60)[0] for process in both]
    assert printed[0] == printed[1] == local_token(home) + "\n"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o666])
def test_one_that_others_can_open_is_refused(home: Path, mode: int) -> None:
    token = local_token(home)
    (home / "token").chmod(mode)
    for ask in (local_token, find_local_token):
        with pytest.raises(InvalidConfig, match=f"mode 0{mode:o}") as caught:
            ask(home)
        assert f"chmod 600 {home / 'token'}" in (caught.value.hint or "")
        assert token not in f"{caught.value.to_wire()}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_one_of_another_user_is_refused(home: Path) -> None:
    local_token(home)
    os.chown(home / "token", 12345, -1)
    with pytest.raises(InvalidConfig, match="not a file of this user"):
        local_token(home)


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"hello", b"aenv_short", b"\xff" * 48, b"x" * 100_000], ids=lambda value: f"{value}"[:20]
)
def test_a_file_with_something_else_is_refused(home: Path, content: bytes) -> None:
    local_token(home)
    (home / "token").write_bytes(content)
    with pytest.raises(InvalidConfig, match="holds no token") as caught:
        local_token(home)
    assert "remove it" in (caught.value.hint or "")


def test_what_is_no_file_is_refused(home: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    local_token(other)
    home.mkdir(parents=True)
    (home / "token").symlink_to(other / "token")
    with pytest.raises(InvalidConfig, match="cannot be read"):
        local_token(home)
    (home / "token").unlink()
    os.mkfifo(home / "token", 0o600)
    with pytest.raises(InvalidConfig, match="not a file"):
        local_token(home)
    (home / "token").unlink()
    (home / "token").mkdir(0o700)
    with pytest.raises(InvalidConfig, match="not a file"):
        local_token(home)


def test_a_home_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AEnvError, match="cannot be"):
        local_token(tmp_path / "file" / "home")
