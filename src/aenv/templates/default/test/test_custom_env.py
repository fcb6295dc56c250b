import custom_env
import pytest


def test_echo_repeats():
    assert custom_env.echo("hello") == {"result": "hello"}
    assert custom_env.echo("hello", times=2) == {"result": "hello hello"}


def test_echo_refuses_zero_times():
    with pytest.raises(ValueError, match="1 or more"):
        custom_env.echo("hello", times=0)


def test_reward_compares_without_the_spaces_around():
    assert custom_env.exact_match(" 42\n", "42")["score"] == 1.0
    assert custom_env.exact_match("41", "42")["score"] == 0.0


def test_function_counts_words():
    assert custom_env.count_words("three short words") == {"words": 3}


def test_healthy():
    assert custom_env.health()["status"] == "healthy"
