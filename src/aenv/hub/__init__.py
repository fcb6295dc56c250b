"""The hub: environments by name and version, their packages, and who may see them."""
