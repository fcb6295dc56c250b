"""PettingZoo, both ways: its environments published as ours, where agents share an instance, and those as its own."""

from aenv.integrations.pettingzoo.envs import AenvAEC as AenvAEC
from aenv.integrations.pettingzoo.envs import parallel_env as parallel_env
from aenv.integrations.pettingzoo.publishing import publish as publish
