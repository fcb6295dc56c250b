import custom_env
import pytest
from reasoning import scoring

from aenv import Invalid


def test_an_episode():
    (task,) = custom_env.tasks("leg_counting", size=1)["tasks"]
    custom_env.begin(**task["reset"])
    assert custom_env.score()["answered"] is False
    for call in custom_env.solution(task["id"]):
        getattr(custom_env, call["name"])(**call["arguments"])
    assert custom_env.score()["score"] == 1.0
    custom_env.answer("no number")
    assert custom_env.score()["passed"] is False


def test_an_unknown_task():
    with pytest.raises(Invalid, match="no dataset 'nothing'"):
        custom_env.begin("nothing-1-0")


@pytest.mark.parametrize("answer", ["4*(x + 1)**2/3 + C", "-sin(2*x)*exp(x) + pi", "sqrt(2)/2 + 0.5", "Q1*R - z"])
def test_formulas(answer):
    assert scoring._program("simple_integration", answer) == ""


@pytest.mark.parametrize("answer", ["exec(x)", "(open)(x)", "x.y", "S('x')", "[x]", "lambdify(x)", "x__y"])
def test_more_than_formulas(answer):
    assert scoring._program("simple_integration", answer)


def test_literals():
    assert scoring._program("n_queens", "[['_', 'Q'], ['Q', '_']]") == ""
    assert scoring._program("n_queens", "_ Q\nQ _") == ""
    assert scoring._program("n_queens", "[x for x in ()]")
    assert scoring._program("n_queens", "f()")
