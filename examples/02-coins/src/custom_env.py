"""Pay an amount with as few coins as possible. In some currencies the largest coin is not the best one."""

from functools import cache

from aenv import Invalid, register_function, register_reset, register_reward, register_tool

COINS = {"euro": (1, 2, 5, 10, 20, 50), "odd": (1, 7, 10, 13)}
now = {"coins": (), "amount": 0, "paid": []}


@register_function
def tasks(domain: str = "odd") -> dict:
    if domain not in COINS:
        raise Invalid(f"there is no domain {domain!r}", hint=f"use one of {', '.join(COINS)}")
    some = [
        {"id": f"{domain}-{amount}", "instruction": f"Pay {amount}.", "reset": {"task": f"{domain}-{amount}"}}
        for amount in range(11, 35)
    ]
    return {"tasks": some, "source": {"name": "coins", "version": "1.0.0"}}


@register_reset
def begin(task: str) -> dict:
    coins, amount = parse(task)
    now.update(coins=coins, amount=amount, paid=[])
    return {"coins": coins, "amount": amount}


@register_tool
def put(coin: int) -> str:
    """Put a coin on the table."""
    if coin not in now["coins"]:
        raise ValueError(f"there is no coin of {coin}")
    now["paid"].append(coin)
    return f"{sum(now['paid'])} of {now['amount']}"


@register_reward
def score() -> dict:
    exact, spare = sum(now["paid"]) == now["amount"], len(now["paid"]) - len(fewest(now["coins"], now["amount"]))
    return {"score": (0.5 if spare else 1.0) if exact else 0.0, "coins_too_many": spare}


@register_function
def solution(task: str) -> list:
    return [{"name": "put", "arguments": {"coin": coin}} for coin in fewest(*parse(task))]


def parse(task: str) -> tuple[tuple[int, ...], int]:
    domain, _, amount = task.partition("-")
    if domain not in COINS or not amount.isdigit():
        raise Invalid(f"there is no task {task!r}", hint="the function 'tasks' tells them")
    return COINS[domain], int(amount)


@cache
def fewest(coins: tuple[int, ...], amount: int) -> tuple[int, ...]:
    return min(((coin, *fewest(coins, amount - coin)) for coin in coins if coin <= amount), key=len, default=())
