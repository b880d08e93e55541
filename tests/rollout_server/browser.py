"""A headless Chromium, whatever it is called here.

``make browser`` installs one. It is looked for under ``TITO_CHROMIUM``, then on the PATH, then
where playwright keeps its own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Root, which test machines often are, may not use Chromium's sandbox; what is shown is our own.
_FLAGS = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser; skips the test, and says why, where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    named = os.environ.get("TITO_CHROMIUM")
    path = named or next(filter(None, map(shutil.which, _NAMES)), None)
    with api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=_FLAGS)
        except api.Error as error:
            reason = str(error).strip().splitlines()[0]
            pytest.skip(f"no Chromium starts here ({reason}); `make browser` installs one")
        yield browser
        browser.close()
