"""The model gateway: any agent points its base URL at it, and its episode is recorded, token by token.

It speaks OpenAI's chat completions and responses and Anthropic's messages, ties each call to an episode by its key,
holds it to limits, and asks one of several servers, whose key no agent ever has.
"""

from __future__ import annotations

from aenv.rl.model_gateway.episodes import Limits as Limits
from aenv.rl.model_gateway.episodes import ModelEpisode as ModelEpisode
from aenv.rl.model_gateway.episodes import Record as Record
from aenv.rl.model_gateway.gateway import ModelGateway as ModelGateway
from aenv.rl.model_gateway.upstreams import Upstream as Upstream
