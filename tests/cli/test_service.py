"""``aenv service``, as far as it goes without a platform."""

import io

import pytest


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["create"], 3, "there is no config.json"),
        (["create", "a b"], 1, "not an environment name"),
        (["create", "a", "-r", "-1"], 2, "-1 is not in the range"),
        (["create", "a", "-r", "many"], 2, "'many' is not a valid integer"),
        (["create", "a", "-p", "70000"], 2, "70000 is not in the range"),
        (["create", "a", "-e", "MODE"], 2, "'MODE' is not KEY=VALUE"),
        (["list", "-n", "a/b"], 1, "not an environment name"),
        (["get", ".."], 1, "'..' is not a name"),
        (["update", "some-id"], 2, "nothing is to be changed"),
        (["update", "some-id", "-e", "A=1", "--clear-env"], 2, "--clear-env and --env are both given"),
        (["update"], 2, "aenv service update --help"),
        (["delete"], 2, "aenv service delete --help"),
        (["delete", "some-id"], 2, "give --yes"),
        (["logs", "some-id", "--tail", "-1"], 2, "-1 is not in the range"),
        (["lits"], 2, "did you mean 'aenv service list'?"),
    ],
)
def test_what_is_refused_before_anybody_is_asked(aenv, monkeypatch, arguments, code, said):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    answer = aenv("service", *arguments)
    assert (answer.code, answer.out) == (code, "")
    assert said in answer.err
    assert "Traceback" not in answer.err
