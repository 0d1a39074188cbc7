"""A real browser without a window, driven by selenium; a test that needs one skips where none is installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def opened_browser(width: int = 1000, height: int = 900) -> Iterator[Any]:
    """A driver of Chromium; its own profile ends with it."""
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    program, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("no Chromium with chromedriver is installed")
    options = selenium.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--mute-audio"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = selenium.Chrome(options=options, service=selenium.ChromeService(driver))
    try:
        resize(opened, width, height)
        yield opened
    finally:
        opened.quit()


def resize(browser: Any, width: int, height: int = 900) -> None:
    """Set the size of the page, also below the narrowest window."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def overflow(browser: Any) -> int:
    """The pixels by which a page is wider than its window."""
    return browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth")


def complaints(browser: Any) -> list[str]:
    """The errors that the page has logged since the last call."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def screenshot(browser: Any, path: Path) -> None:
    """Save the page as it is shown."""
    browser.save_screenshot(str(path))
