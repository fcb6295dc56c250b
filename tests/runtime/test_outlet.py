"""The wait for a sandbox's only way out."""

import socket
import threading

import pytest

from aenv.errors import StartFailed
from aenv.runtime import outlet


def test_it_is_over_when_somebody_listens():
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        waiting = threading.Thread(target=outlet.wait, args=(f"127.0.0.1:{made.getsockname()[1]}",))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        made.listen()
        waiting.join(60)
        assert not waiting.is_alive()


def test_nobody_is_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(outlet, "_PATIENCE", 0.0)
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        with pytest.raises(StartFailed, match="is not there") as caught:
            outlet.wait(f"127.0.0.1:{made.getsockname()[1]}")
        assert "engine" in str(caught.value.hint)
