import custom_env
import pytest

from aenv import Invalid, ToolError


def play(task):
    custom_env.begin(task)
    for step in custom_env.solution(task):
        name, arguments = step["name"], step["arguments"]
        if name == custom_env.FINISH:
            last = custom_env.finish_turn(**arguments)
        elif name == custom_env.ADDED:
            custom_env.call_added_function(**arguments)
        else:
            custom_env._conversation().call(name, arguments)
    return last, custom_env.correct()


@pytest.mark.parametrize("category", ["base", "miss_func", "miss_param", "long_context"])
def test_a_conversation_and_its_solution(category):
    last, found = play(f"multi_turn_{category}_0")
    assert last == {"over": True, "user": ""}
    assert found["score"] == 1.0
    custom_env.begin(f"multi_turn_{category}_0")
    assert custom_env.correct()["score"] == 0.0


def test_an_unknown_task_begins_nothing():
    custom_env.begin("multi_turn_base_0")
    with pytest.raises(Invalid, match="no conversation 'multi_turn_base_200'"):
        custom_env.begin("multi_turn_base_200")
    with pytest.raises(ToolError, match="no conversation has begun"):
        custom_env.finish_turn()
