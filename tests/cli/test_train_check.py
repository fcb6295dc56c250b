"""``aenv train-check``; tests/integrations run it on the trainers that have a virtual environment of their own."""

import os
import sys
from types import ModuleType

import gymnasium
import pytest

from aenv import SandboxLost
from aenv.integrations import FRAMEWORKS, Framework


def rows(answer):
    return {row["check"]: row for row in answer.data["checks"]}


@pytest.fixture
def framework(monkeypatch):
    """One that is installed as Gymnasium is, and whose module is the test's."""
    module = ModuleType("trainer_of_a_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    tested = ".".join(gymnasium.__version__.split(".")[:2])
    monkeypatch.setitem(FRAMEWORKS, "mine", Framework("gymnasium", tested, module.__name__))
    return module


def test_which_there_are(aenv):
    found = {row["framework"]: row for row in aenv("train-check", "-o", "json").data}
    assert found.keys() == FRAMEWORKS.keys()
    assert found["gymnasium"]["installed"] == gymnasium.__version__
    assert aenv("train-check").out.startswith("FRAMEWORK")


def test_an_episode_of_gymnasium(aenv):
    answer = aenv("train-check", "gymnasium", "-o", "json")
    assert (answer.code, answer.data["ok"]) == (0, True)
    assert rows(answer)["episode"]["detail"].endswith("went on in another, and was scored 1")


def test_one_that_is_not_known(aenv):
    answer = aenv("train-check", "gymnasum")
    assert (answer.code, answer.out) == (2, "")
    assert "did you mean 'gymnasium'?" in answer.err


def test_one_that_is_not_installed(aenv, monkeypatch):
    monkeypatch.setitem(FRAMEWORKS, "none", Framework("no-such-trainer", "1.0", "no.module"))
    answer = aenv("train-check", "none", "-o", "json")
    assert answer.code == 1
    assert rows(answer)["package"]["fix"] == "pip install 'aenvironment[none]'"
    assert list(rows(answer)) == ["package"]


def test_another_version(aenv, framework, monkeypatch):
    framework.check = lambda: "it was played"
    monkeypatch.setitem(FRAMEWORKS, "mine", FRAMEWORKS["mine"]._replace(tested="0.9"))
    answer = aenv("train-check", "mine", "-o", "json")
    assert answer.code == 0
    assert [row["status"] for row in answer.data["checks"]] == ["warn", "ok", "ok"]
    assert "gymnasium==0.9.*" in rows(answer)["package"]["fix"]


def test_one_that_does_not_import(aenv, framework, monkeypatch):
    monkeypatch.setitem(FRAMEWORKS, "mine", FRAMEWORKS["mine"]._replace(module="aenv.integrations.none"))
    answer = aenv("train-check", "mine", "-o", "json")
    assert answer.code == 1
    assert "No module named 'aenv.integrations.none'" in rows(answer)["adapter"]["detail"]


@pytest.mark.parametrize(
    ("raised", "told", "fix"),
    [
        (SandboxLost("it is gone", hint="look at it"), "it is gone", "look at it"),
        (TypeError("no such argument"), "TypeError: no such argument", "aenv doctor"),
    ],
)
def test_an_episode_that_fails(aenv, framework, raised, told, fix):
    def check():
        os.write(1, b"a trainer's own words\n")
        raise raised

    framework.check = check
    answer = aenv("train-check", "mine", "-o", "json")
    assert answer.code == 1
    assert (rows(answer)["episode"]["detail"], rows(answer)["episode"]["fix"]) == (told, fix)
    assert "a trainer's own words" in answer.err
