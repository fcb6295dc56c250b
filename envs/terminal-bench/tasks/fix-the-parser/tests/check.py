"""Runs the agent's program on texts that it has not seen. What it leaves running is ended before the verdict."""

import os
import signal
import subprocess
import sys

GOOD = {
    "1h30m": 5400,
    "90s": 90,
    "12m": 720,
    "2d": 172800,
    "1d2h3m4s": 93784,
    "100h": 360000,
    "10d15s": 864015,
    "0s": 0,
}
BAD = ["", "1", "h", "1h 30m", "30m1h", "1h1h", "1.5h", "-1h", "1w", "h1", "1h30", "x1h", "1hx"]


def processes():
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def printed(text):
    done = subprocess.run(
        [sys.executable, "-I", "/app/durations.py", text], capture_output=True, text=True, timeout=10, check=False
    )
    return done.returncode, done.stdout.strip()


def main():
    for text, seconds in GOOD.items():
        if printed(text) != (0, str(seconds)):
            return f"{text!r}: {printed(text)}"
    for text in BAD:
        if printed(text) != (1, "invalid"):
            return f"{text!r}: {printed(text)}"
    return ""


before = processes()
try:
    wrong = main()
except Exception as exc:
    wrong = repr(exc)
for pid in processes() - before:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
print(wrong or "all is well")
sys.exit(bool(wrong))
