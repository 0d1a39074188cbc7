"""Take the pictures of docs/pictures from the pages of the walk, with Chromium (`chromium` and `chromedriver`).

Run `python docs/walk.py` first, then `python docs/screenshots.py`. The pictures have 256 colours, so that each is
below 150 KB.
"""

from __future__ import annotations

import io
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from walk import ANSWER, OUT, PORT, ROOT, STEPS, background, environment

PICTURES = ROOT / "docs" / "pictures"
MOST_BYTES = 150_000
_QUESTION = "What is the capital of Peru?"


@contextmanager
def browser() -> Iterator[Any]:
    """Yield a driver of Chromium without a window."""
    from selenium import webdriver

    program, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if program is None or driver is None:
        sys.exit("install Chromium and its driver (Debian: `apt install chromium chromium-driver`)")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield opened
    finally:
        opened.quit()


def resize(opened: Any, width: int, height: int) -> None:
    """Set the size of the page in pixels."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def save(opened: Any, name: str) -> None:
    """Write the page as it is shown to docs/pictures."""
    from PIL import Image

    whole = Image.open(io.BytesIO(opened.get_screenshot_as_png())).convert("RGB")
    path = PICTURES / f"{name}.png"
    whole.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    if path.stat().st_size > MOST_BYTES:
        sys.exit(f"{path.name} has {path.stat().st_size:,} bytes, more than {MOST_BYTES:,}")
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


def graph(opened: Any) -> None:
    """Take the graph page with one rewritten block."""
    from selenium.webdriver.common.by import By

    resize(opened, 1440, 810)
    opened.get(f"file://{ROOT / OUT}/graph.html")
    opened.find_element(By.LINK_TEXT, "mlp_0").click()
    time.sleep(1)
    save(opened, "graph")


def report(opened: Any) -> None:
    """Take the top of a training's report."""
    resize(opened, 1280, 780)
    opened.get(f"file://{ROOT / OUT}/adapter/report.html")
    time.sleep(1)
    save(opened, "report")


def chat(opened: Any) -> None:
    """Take the chat page of the walk's server after one answer."""
    from selenium.webdriver.common.by import By

    resize(opened, 1280, 600)
    step = next(step for step in STEPS if step.command.endswith("&"))
    with background(step, environment()):
        opened.get(f"http://127.0.0.1:{PORT}/")
        opened.find_element(By.ID, "prompt").send_keys(_QUESTION + "\n")
        until = time.monotonic() + 60
        while ANSWER not in opened.find_element(By.TAG_NAME, "body").text and time.monotonic() < until:
            time.sleep(0.2)
        time.sleep(1)
        save(opened, "chat")


def main() -> None:
    if not (ROOT / OUT / "graph.html").is_file():
        sys.exit("run `python docs/walk.py` first")
    PICTURES.mkdir(exist_ok=True)
    with browser() as opened:
        graph(opened)
        report(opened)
        chat(opened)


if __name__ == "__main__":
    main()
