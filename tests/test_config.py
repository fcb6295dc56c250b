"""Settings: where a value comes from, what is wrong with it, and what an author's code gets to see."""

from __future__ import annotations

import io
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from aenv import config
from aenv.errors import InvalidConfig


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without settings."""
    for setting in config.SETTINGS:
        monkeypatch.delenv(setting.variable, raising=False)
    monkeypatch.setenv("AENV_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_the_first_of_argument_variable_file_and_default_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.lookup("threads") == (512, "default")
    config.write_file({"threads": 3})
    assert config.lookup("threads") == (3, str(config.path()))
    monkeypatch.setenv("AENV_THREADS", "")
    assert config.get("threads") == 3
    assert config.variable("threads") is None
    monkeypatch.setenv("AENV_THREADS", "4")
    assert config.lookup("threads") == (4, "environment variable AENV_THREADS")
    assert config.variable("threads") == 4
    assert config.lookup("threads", 5) == (5, "argument")
    assert config.get("threads", 0) == 0


@pytest.mark.parametrize("setting", config.SETTINGS, ids=lambda setting: setting.key)
def test_every_setting_has_a_default_and_a_meaning(setting: config.Setting) -> None:
    assert config.lookup(setting.key) == (setting.default, "default")
    assert setting.about
    assert config.setting(setting.key) is setting


@pytest.mark.parametrize("setting", [s for s in config.SETTINGS if not s.in_file], ids=lambda setting: setting.key)
def test_what_an_engine_tells_one_sandbox_is_not_read_from_the_file(setting: config.Setting) -> None:
    config.write_file({setting.key: "from the file"})
    assert config.get(setting.key) == setting.default


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("threads", "7", 7),
        ("threads", " 7 ", 7),
        ("grace", "0", 0.0),
        ("grace", "2.5", 2.5),
        ("max_body", "1", 1),
        ("debug", "1", True),
        ("debug", "yes", True),
        ("debug", "0", False),
        ("debug", "False", False),
        ("debug", "off", False),
        ("system_url", "http://h", "http://h"),
        ("seed", "7", "7"),
    ],
)
def test_a_variable_becomes_what_the_setting_is(
    monkeypatch: pytest.MonkeyPatch, key: str, text: str, value: Any
) -> None:
    monkeypatch.setenv(config.setting(key).variable, text)
    found = config.get(key)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("threads", "many", "is not a number"),
        ("threads", "1.5", "is not a number"),
        ("threads", "0", "is less than 1"),
        ("threads", "-1", "is less than 1"),
        ("max_body", "0", "is less than 1"),
        ("max_body", "64MB", "is not a number"),
        ("grace", "-0.1", "is less than 0"),
        ("grace", "nan", "is less than 0"),
    ],
)
def test_a_variable_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, key: str, value: str, problem: str) -> None:
    variable = config.setting(key).variable
    monkeypatch.setenv(variable, value)
    with pytest.raises(InvalidConfig, match=f"{variable}: '{value}' {problem}") as caught:
        config.get(key)
    assert caught.value.hint == f"{key}: {config.setting(key).about}"


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("threads", "x", "is not a number"),
        ("threads", [], "is not a number"),
        ("threads", True, "is not a number"),
        ("threads", 1e999, "is not a number"),
        ("threads", 0, "is less than 1"),
        ("system_url", 5, "is not text"),
        ("api_key", {}, "is not text"),
    ],
)
def test_a_value_in_the_file_that_does_not_fit(key: str, value: Any, problem: str) -> None:
    config.write_file({key: value})
    with pytest.raises(InvalidConfig, match=problem) as caught:
        config.get(key)
    assert caught.value.message.startswith(f"{config.path()}: {key}: ")


def test_an_unknown_setting_is_answered_with_the_nearest() -> None:
    with pytest.raises(InvalidConfig, match="no setting 'sytem_url'") as caught:
        config.get("sytem_url")
    assert caught.value.hint == "did you mean 'system_url'?"
    with pytest.raises(InvalidConfig) as far:
        config.get("zzz")
    assert "threads" in (far.value.hint or "")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "is not valid JSON"),
        (b"", "is not valid JSON"),
        (b"\xff\xfe\xfa", "is not valid JSON"),
        (b'"\xff"', "is not valid JSON"),
        (b"[]", "must hold a JSON object"),
        (b"null", "must hold a JSON object"),
    ],
)
def test_a_file_that_cannot_be_understood(home: Path, content: bytes, problem: str) -> None:
    home.mkdir()
    config.path().write_bytes(content)
    with pytest.raises(InvalidConfig, match=problem) as caught:
        config.read_file()
    assert str(config.path()) in caught.value.message
    assert "aenv config reset" in (caught.value.hint or "")


def test_a_file_that_cannot_be_read() -> None:
    config.path().mkdir(parents=True)
    with pytest.raises(InvalidConfig, match="cannot be read"):
        config.read_file()


def test_no_file_is_no_setting() -> None:
    assert config.read_file() == {}


def test_the_file_is_for_its_user_only(home: Path) -> None:
    config.write_file({"api_key": "secret", "unknown": [1]})
    assert config.read_file() == {"api_key": "secret", "unknown": [1]}
    assert stat.S_IMODE(config.path().stat().st_mode) == 0o600
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    config.path().chmod(0o644)
    config.write_file({})
    assert stat.S_IMODE(config.path().stat().st_mode) == 0o600


def test_the_file_is_replaced_in_one_step(home: Path) -> None:
    config.write_file({"threads": 1})
    with config.path().open() as reader:
        config.write_file({"threads": 2})
        assert json.load(reader) == {"threads": 1}
    assert config.read_file() == {"threads": 2}
    assert [path.name for path in home.iterdir()] == ["config.json"]


def test_what_cannot_be_written_leaves_the_file_as_it_was(home: Path) -> None:
    config.write_file({"threads": 1})
    with pytest.raises(TypeError):
        config.write_file({"threads": object()})
    assert config.read_file() == {"threads": 1}
    assert [path.name for path in home.iterdir()] == ["config.json"]


def test_a_file_left_by_a_crash_gives_nothing_away(home: Path) -> None:
    home.mkdir()
    left = config.path().with_name(f".{config.path().name}.{os.getpid()}.tmp")
    left.write_text("old")
    left.chmod(0o644)
    config.write_file({"api_key": "secret"})
    assert stat.S_IMODE(config.path().stat().st_mode) == 0o600
    assert not left.exists()


def test_home_is_in_the_users_home_when_nobody_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AENV_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config.path() == tmp_path / ".aenv" / "config.json"


def test_an_author_does_not_see_what_is_meant_for_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_OWN", "1")
    for setting in config.SETTINGS:
        monkeypatch.setenv(setting.variable, "1")
    seen = config.environment()
    assert seen["MY_OWN"] == "1"
    assert not {setting.variable for setting in config.SETTINGS if not setting.shared} & set(seen)


def test_a_process_we_start_inherits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("COVERED", "1")
    found = config.child_environment({"COVERED": "2", "NEW": "3"})
    assert (found["KEPT"], found["COVERED"], found["NEW"]) == ("1", "2", "3")
    assert "NEW" not in os.environ


def test_defaults_do_not_cover_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET", "mine")
    monkeypatch.setenv("UNSET", "")
    monkeypatch.delenv("UNSET")
    config.default_environment({"SET": "theirs", "UNSET": "theirs"})
    assert (os.environ["SET"], os.environ["UNSET"]) == ("mine", "theirs")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "no_color", "coloured"),
    [(Terminal(), "", True), (Terminal(), "1", False), (io.StringIO(), "", False), (sys.__stdin__, "1", False)],
)
def test_colour(monkeypatch: pytest.MonkeyPatch, stream: Any, no_color: str, coloured: bool) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    assert config.colour(stream) is coloured
