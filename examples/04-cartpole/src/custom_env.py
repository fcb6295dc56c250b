"""Gymnasium's pole on a cart, published as an environment: tools reset and step, and the return as the reward."""

import gymnasium

from aenv.integrations.gymnasium import publish

publish(lambda: gymnasium.make("CartPole-v1"))
