"""Asks the agent's client about orders that it has not seen, kept by a service of the verifier's own."""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time


def processes():
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


def main(folder):
    ids = random.sample(range(1, 10_000), 37)
    orders = [
        {"id": one, "amount": random.randrange(1, 1000), "status": random.choice(["paid", "open", "lost"])}
        for one in ids
    ]
    wanted = sum(order["amount"] for order in orders if order["status"] == "paid")
    with open(f"{folder}/orders.json", "w") as file:
        json.dump(orders, file)
    subprocess.Popen([sys.executable, "-I", "/tests/service.py", f"{folder}/orders.json", f"{folder}/port"])
    while not os.path.exists(f"{folder}/port"):
        time.sleep(0.02)
    with open(f"{folder}/port") as file:
        url = f"http://127.0.0.1:{file.read()}"
    done = subprocess.run(
        [sys.executable, "-I", "/app/client.py", url], capture_output=True, text=True, timeout=20, check=False
    )
    return "" if done.stdout.strip() == str(wanted) else f"{wanted} is right, and not {done.stdout!r} {done.stderr}"


before = processes()
try:
    wrong = main(tempfile.mkdtemp())
except Exception as exc:
    wrong = repr(exc)
for pid in processes() - before:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
print(wrong or "all is well")
sys.exit(bool(wrong))
