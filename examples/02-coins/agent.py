"""Agents for ``aenv eval coins --agent agent.py:...``: functions that play one task."""

import random


async def largest(env, task):
    """Always the largest coin that fits, which is not the best in every currency."""
    left, coins = env.observation["amount"], env.observation["coins"]
    while left:
        coin = max(coin for coin in coins if coin <= left)
        await env.call_tool("put", {"coin": coin})
        left -= coin


async def guessing(env, task):
    """Any coin that fits, large ones more often; another choice in each sample."""
    drawn = random.Random(env.sample_seed)
    left, coins = env.observation["amount"], env.observation["coins"]
    while left:
        fitting = [coin for coin in coins if coin <= left]
        coin = drawn.choices(fitting, weights=[coin**3 for coin in fitting])[0]
        await env.call_tool("put", {"coin": coin})
        left -= coin
