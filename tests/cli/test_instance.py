"""``aenv instance``, as far as it goes without a platform."""

import pytest


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["create"], 3, "there is no config.json"),
        (["create", "a b"], 1, "not an environment name"),
        (["create", "a", "--ttl", "soon"], 1, "--ttl 'soon' is not a length of time"),
        (["create", "a", "-e", "MODE"], 2, "'MODE' is not KEY=VALUE"),
        (["create", "a", "--label", "=x"], 2, "'=x' is not KEY=VALUE"),
        (["list", "-n", "a/b"], 1, "not an environment name"),
        (["list", "--label", "x"], 2, "'x' is not KEY=VALUE"),
        (["exec", "some-id"], 2, "aenv instance exec --help"),
        (["exec", "some-id", "--timeout", "0", "--", "ls"], 2, "--timeout"),
        (["extend", "some-id", "-5"], 2, "aenv instance extend --help"),
        (["extend", "some-id", "0"], 1, "ttl '0' is not a length of time"),
        (["expose", "some-id", "70000"], 2, "70000 is not in the range"),
        (["get", ".."], 1, "'..' is not a name"),
        (["delete"], 2, "aenv instance delete --help"),
        (["shel", "some-id"], 2, "did you mean 'aenv instance shell'?"),
        (["watch", "some-id"], 2, "aenv instance --help"),
        (["lits"], 2, "did you mean 'aenv instance list'?"),
    ],
)
def test_what_is_refused_before_anybody_is_asked(aenv, arguments, code, said):
    answer = aenv("instance", *arguments)
    assert (answer.code, answer.out) == (code, "")
    assert said in answer.err
    assert "Traceback" not in answer.err
