"""BFCL's multi-turn conversations, and one of them as it goes on."""
