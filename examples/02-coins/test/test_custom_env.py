import custom_env
import pytest

from aenv import Invalid


@pytest.mark.parametrize("domain", custom_env.COINS)
def test_every_task_is_solved_by_its_solution_and_by_nothing_less(domain):
    for task in custom_env.tasks(domain)["tasks"]:
        custom_env.begin(**task["reset"])
        assert custom_env.score()["score"] == 0.0
        for step in custom_env.solution(**task["reset"]):
            assert step["name"] == "put"
            custom_env.put(**step["arguments"])
        assert custom_env.score() == {"score": 1.0, "coins_too_many": 0}


def test_one_coin_too_many_is_half_a_success():
    custom_env.begin("odd-14")
    for coin in (13, 1):
        custom_env.put(coin)
    assert custom_env.score()["score"] == 1.0
    custom_env.begin("odd-14")
    for coin in (10, 1, 1, 1, 1):
        custom_env.put(coin)
    assert custom_env.score() == {"score": 0.5, "coins_too_many": 3}


def test_what_is_refused():
    with pytest.raises(ValueError, match="no coin of 3"):
        custom_env.put(3)
    for task in ("odd", "odd-x", "pound-3"):
        with pytest.raises(Invalid):
            custom_env.begin(task)
