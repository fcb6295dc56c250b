"""``aenv config``."""

import json
from io import BytesIO, TextIOWrapper

import pytest


@pytest.fixture
def file(home):
    return home / "config.json"


def test_a_value_is_set_shown_and_unset(aenv, file):
    assert aenv("config", "set", "system_url", "http://a").code == 0
    assert json.loads(file.read_text()) == {"system_url": "http://a"}
    assert file.stat().st_mode & 0o777 == 0o600
    assert aenv("config", "get", "system_url").out == "http://a\n"
    shown = {row["key"]: row for row in aenv("config", "show", "-o", "json").data}
    assert shown["system_url"]["source"] == str(file)
    assert shown["hub_url"] == {
        "key": "hub_url",
        "value": None,
        "source": "default",
        "variable": "AENV_HUB_URL",
    }
    assert aenv("config", "unset", "system_url", "-o", "json").data["value"] is None
    assert aenv("config", "get", "system_url").code == 1
    assert aenv("config", "get", "system_url", "-o", "json").data["value"] is None
    assert aenv("config", "unset", "system_url").code == 1


def test_numbers_are_numbers(aenv, file):
    aenv("config", "set", "threads", "8")
    assert json.loads(file.read_text()) == {"threads": 8}
    answer = aenv("config", "set", "threads", "many")
    assert (answer.code, answer.out) == (3, "")
    assert "'many' is not a number" in answer.err
    assert json.loads(file.read_text()) == {"threads": 8}


def test_a_secret_is_shown_only_when_asked_for(aenv):
    answer = aenv("config", "set", "api_key", "hunter2", "-o", "json")
    assert "hunter2" not in answer.out + answer.err
    assert "hunter2" not in aenv("config", "show").out
    assert "hunter2" in aenv("config", "show", "--reveal").out
    assert aenv("config", "get", "api_key").out == "hunter2\n"


def test_the_environment_counts_more(aenv, monkeypatch):
    monkeypatch.setenv("AENV_SYSTEM_URL", "http://variable")
    answer = aenv("config", "set", "system_url", "http://file")
    assert "AENV_SYSTEM_URL is set and counts more" in answer.err
    assert aenv("config", "get", "system_url", "-o", "json").data == {
        "key": "system_url",
        "value": "http://variable",
        "source": "environment variable AENV_SYSTEM_URL",
    }


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("sistem_url", "x", "did you mean 'system_url'?"),
        ("attach", "x", "use the environment variable DUMMY_INSTANCE_IP"),
        ("system_url", "", "needs a value"),
    ],
)
def test_what_cannot_be_set(aenv, file, key, value, message):
    answer = aenv("config", "set", key, value)
    assert answer.code == 3
    assert message in answer.err
    assert not file.exists()


def test_a_secret_is_read_where_nobody_looks(aenv, file, monkeypatch):
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"aenv_secret\n")))
    answer = aenv("config", "set", "api_key")
    assert answer.code == 0
    assert "aenv_secret" not in answer.out + answer.err
    assert json.loads(file.read_text()) == {"api_key": "aenv_secret"}
    answer = aenv("config", "set", "system_url")
    assert (answer.code, "give a value for system_url" in answer.err) == (2, True)


def test_init_lists_every_setting_and_keeps_a_file_that_is_there(aenv, file):
    assert aenv("config", "path").out == f"{file}\n"
    assert aenv("config", "path", "-o", "json").data == {"path": str(file)}
    assert aenv("config", "init").code == 0
    assert set(json.loads(file.read_text()).values()) == {None}
    assert aenv("config", "get", "grace").out == "10.0\n"
    aenv("config", "set", "system_url", "http://a")
    assert aenv("config", "init").code == 1
    assert aenv("config", "get", "system_url").out == "http://a\n"
    assert aenv("config", "init", "--force").code == 0
    assert aenv("config", "get", "system_url").code == 1


def test_reset_asks_and_mends_a_broken_file(aenv, file, monkeypatch):
    file.parent.mkdir()
    file.write_text("{")
    answer = aenv("config", "show")
    assert (answer.code, answer.out) == (3, "")
    assert "aenv config reset" in answer.err
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda _: "n")
    assert aenv("config", "reset").code == 130
    assert file.exists()
    assert aenv("config", "reset", "--yes", "-o", "json").data == {"file": str(file)}
    assert not file.exists()
    assert aenv("config", "reset").code == 0


def test_an_unknown_key_in_the_file_is_warned_about(aenv, file):
    file.parent.mkdir()
    file.write_text('{"colour": "red"}')
    answer = aenv("config", "show")
    assert answer.code == 0
    assert "colour is not a known setting" in answer.err
    assert aenv("config", "unset", "colour").code == 0
    assert json.loads(file.read_text()) == {}
