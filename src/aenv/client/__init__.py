"""The SDK: ``Environment`` and what it stands on."""
