import custom_env
import pytest


def test_the_digit_that_is_shown_is_the_key_to_press():
    assert custom_env.show(digit=3) == "The display shows 3."
    assert custom_env.right() == 0.0
    assert custom_env.press(3) == "You pressed 3."
    assert custom_env.right() == 1.0


def test_only_the_first_key_counts():
    custom_env.show(digit=3)
    custom_env.press(2)
    custom_env.press(3)
    assert custom_env.right() == 0.0


def test_a_seed_shows_the_same_digit_again():
    assert custom_env.show(seed=7) == custom_env.show(seed=7)
    assert len({custom_env.show(seed=seed) for seed in range(40)}) == custom_env.KEYS


def test_a_key_that_is_not_there():
    with pytest.raises(ValueError, match="keys 0 to 4"):
        custom_env.press(5)
    with pytest.raises(ValueError, match="keys 0 to 4"):
        custom_env.show(digit=9)
