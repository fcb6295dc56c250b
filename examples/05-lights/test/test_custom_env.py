import custom_env


def test_the_button_below_the_light_is_right():
    lights = custom_env.Lights()
    observation, _ = lights.reset(seed=1)
    total = 0.0
    for press in range(custom_env.PRESSES):
        observation, reward, over, cut, _ = lights.step(observation.argmax())
        total += reward
        assert (over, cut) == (press == custom_env.PRESSES - 1, False)
    assert total == 1.0


def test_any_other_is_worth_nothing():
    lights = custom_env.Lights()
    observation, _ = lights.reset(seed=1)
    assert lights.step((observation.argmax() + 1) % custom_env.LIGHTS)[1] == 0.0
