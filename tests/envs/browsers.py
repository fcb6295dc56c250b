"""Help for tests that need a browser of this machine."""

from __future__ import annotations

import shutil

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def needs_browser() -> pytest.MarkDecorator:
    found = any(map(shutil.which, NAMES))
    return pytest.mark.skipif(not found, reason="this machine has no Chromium: apt-get install chromium")
