import shutil

import custom_env
import pytest

from aenv import Invalid


@pytest.mark.skipif(shutil.which("java") is None, reason="ScienceWorld needs Java, and this machine has none")
def test_an_episode():
    try:
        (task,) = custom_env.tasks("find-non-living-thing", size=1)["tasks"]
        assert "room" in custom_env.begin(**task["reset"])
        assert custom_env.score()["score"] == 0.0
        for call in custom_env.solution(task["id"]):
            seen = getattr(custom_env, call["name"])(**call["arguments"])
        assert seen["done"] is True
        assert custom_env.score()["score"] == 1.0
    finally:
        custom_env.close()


def test_unknown_tasks():
    with pytest.raises(Invalid, match="no task 'boyl'"):
        custom_env.tasks("boyl")
    with pytest.raises(Invalid, match="no task 'boil'"):
        custom_env.begin("boil")


def test_nothing_is_played_before_a_task_has_begun():
    with pytest.raises(Invalid, match="no task has begun"):
        custom_env.look()
