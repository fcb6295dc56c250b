"""Games of PettingZoo's, of which a variable names one."""

import os

from aenv.integrations.pettingzoo import publish


def make():
    if os.environ.get("GAME") == "rps":
        from pettingzoo.classic import rps_v2

        return rps_v2.parallel_env(max_cycles=5)
    from pettingzoo.classic import tictactoe_v3

    return tictactoe_v3.env()


publish(make)
