"""Runs in an environment that the agent has never been in: only /app/out is the agent's."""

import os
import subprocess
import sys

PAIRS = [
    ("LEMON", "Attack at dawn!", "Lxfopv ef rnhr!"),
    ("key", "The quick brown fox, 13 times.", "Dlc aygmo zbsux jmh, 13 xgwiq."),
    ("A", "Same", "Same"),
]


def run(way, key, text):
    done = subprocess.run(
        [sys.executable, "-I", "/app/out/vigenere.py", way, key, text],
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    return done.stdout.rstrip("\n")


if os.path.exists("/app/example.txt") or os.path.exists("/app/left-by-the-agent"):
    sys.exit("this is not the verifier's own environment")
for key, plain, secret in PAIRS:
    if run("encrypt", key, plain) != secret or run("decrypt", key, secret) != plain:
        sys.exit(f"wrong for {plain!r}: {run('encrypt', key, plain)!r}")
