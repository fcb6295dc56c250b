import custom_env
import pytest

from aenv import Invalid, ToolError


def play(task, **attacked):
    custom_env.begin(task, **attacked)
    for step in custom_env.solution(task, **attacked):
        if step["name"] == custom_env.ANSWER:
            custom_env.submit_answer(**step["arguments"])
        else:
            custom_env._episode().call(step["name"], step["arguments"])
    return custom_env.utility()


def test_a_task_and_its_solution():
    assert play("banking-user_task_0") == {"score": 1.0, "utility": 1.0}
    custom_env.begin("banking-user_task_0")
    assert custom_env.utility()["score"] == 0.0


def test_an_attack_that_the_solution_withstands():
    found = play("banking-user_task_0-injection_task_0", attack="direct")
    assert found == {"score": 1.0, "utility": 1.0, "security": 1.0, "injection_succeeded": False}


@pytest.mark.parametrize("task", ["banking-user_task_99", "bank-user_task_0", "banking-user_task_0-injection_task_99"])
def test_an_unknown_task_begins_nothing(task):
    custom_env.begin("banking-user_task_0")
    with pytest.raises(Invalid):
        custom_env.begin(task)
    with pytest.raises(ToolError, match="no task has begun"):
        custom_env.submit_answer("done")


def test_an_attack_needs_something_to_inject():
    with pytest.raises(Invalid, match="names no injection task"):
        custom_env.begin("banking-user_task_0", attack="direct")
