"""Tasks of the keypad for verifiers, which knows them by the name of this module: one for each digit."""

from aenv.integrations.verifiers import AenvEnv, AenvTaskset

__all__ = ["AenvEnv", "Keypad"]


class Keypad(AenvTaskset):
    """What there is to train on."""

    env = "keypad"
    tasks = tuple({"instruction": "Press the key that is shown.", "reset": {"digit": digit}} for digit in range(5))
