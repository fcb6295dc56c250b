"""One line for the sums; a little more for words that a simulated user wants to hear, where there is a model for it."""

import os

from aenv.integrations.verifiers import publish

if url := os.environ.get("USER_URL"):
    client = {"type": "eval", "base_url": url, "api_key_var": "NO_KEY"}
    user = {"model": "user", "client": client, "runtime": {"type": "subprocess"}}
    publish({"id": "user-sim", "taskset": {"id": "words"}, "user": user}, seat="assistant")
else:
    publish("sums", shell=True)
