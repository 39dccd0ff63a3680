"""Headless Chromium with its own driver, for tests of pages. Nothing is downloaded."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from required import unless_required

PROGRAMS = ("chromium", "chromedriver")


def missing() -> str:
    """Return the reason why no browser can be started here, or "" if one can.

    Raises:
        RuntimeError: no browser can be started, and SELECTRON_REQUIRED names `browser`.
    """
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    reason = f"there is no browser ({', '.join(absent)}); tools/install_browser.sh installs it" if absent else ""
    return unless_required("browser", reason)


class Browser:
    """Running browser with one page.

    Args:
        driver: driver object of selenium.
    """

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def show(self, width: int, height: int = 900, *, scheme: str = "light") -> None:
        """Set the size of the window in CSS pixels, and the colour scheme, light or dark."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 640}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def open(self, path: Path) -> None:
        """Open a page from disk, and wait until it and its pictures are loaded."""
        self._driver.get(path.as_uri())
        self._driver.execute_async_script(
            "const done = arguments[0];"
            "Promise.all([...document.images].map(i => i.decode().catch(() => 0))).then(() => done())"
        )

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a function body in the page and return its result."""
        return self._driver.execute_script(script, *arguments)

    def complaints(self) -> list[str]:
        """Return the console messages since the last call."""
        return [entry["message"] for entry in self._driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Return the addresses requested since the last call, successfully or not."""
        events = [json.loads(entry["message"])["message"] for entry in self._driver.get_log("performance")]
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]

    def press(self, selector: str) -> None:
        """Click an element."""
        self._driver.find_element("css selector", selector).click()


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Context manager with a browser that has an empty profile in a folder."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = shutil.which("chromium") or ""
    flags = ["headless=new", "disable-gpu", "disable-dev-shm-usage", f"user-data-dir={profile}", "disable-extensions"]
    if os.geteuid() == 0:
        flags.append("no-sandbox")  # Chromium refuses to start as root with a sandbox
    for flag in flags:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))  # an explicit path prevents a download
    try:
        driver.get("about:blank")
        driver.get_log("performance")  # discard the requests of the browser's start page
        yield Browser(driver)
    finally:
        driver.quit()
