"""The agent of agent-lightning's controller: ``agent_class: agent_lightning_agent:Keypad``."""

from aenv.integrations.agent_lightning import AenvAgent


class Keypad(AenvAgent):
    """Plays what a rollout's row says."""

    env = "keypad"
