"""A headless Chromium that a test drives, where the machine has one."""

import contextlib
import importlib.util
import shutil
from collections.abc import Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def chromium(*, width: int = 1400, height: int = 1000) -> Iterator[Any]:
    """A selenium driver. Skips the test where Chromium, its driver or selenium is not installed."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (program and driver and importlib.util.find_spec("selenium")):
        pytest.skip("Chromium, chromedriver or selenium is not installed (Debian: apt-get install chromium chromium-driver)")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = program
    flags = ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars")
    for flag in (*flags, f"window-size={width},{height}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(options=options, service=Service(driver))
    try:
        yield made
    finally:
        made.quit()


def requested(driver: Any) -> list[str]:
    """The addresses that the page has asked for since the last call, `data:` and the browser's own left out."""
    import json

    found = []
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            address = message["params"]["request"]["url"]
            if not address.startswith(("data:", "blob:", "chrome:", "chrome-extension:")):
                found.append(address)
    return found


def complaints(driver: Any) -> list[str]:
    """What the browser's console holds since the last call: errors of scripts, and what the security policy forbade."""
    return [entry["message"] for entry in driver.get_log("browser")]
