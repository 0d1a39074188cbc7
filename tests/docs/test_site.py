"""`make docs`: the site builds strictly, and its pages and its search work in a real browser without a network."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from browser import complaints, opened_browser, overflow, resize
from places import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-3000:]
    return folder


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = [line for line in text.splitlines() if ("<script" in line or "<link" in line) and "//" in line]
        assert not [line for line in loaded if 'src="http' in line or 'stylesheet" href="http' in line], page.name


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Write no line for a request."""


@pytest.fixture(scope="module")
def served(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(site))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened_browser(1400) as opened:
        yield opened


def test_pages_open_in_a_browser_and_lead_to_each_other(served: str, browser: Any) -> None:
    browser.get(f"{served}/index.html")
    assert browser.find_element("tag name", "h1").text.startswith("Documentation")
    browser.find_element("css selector", "article").find_element("link text", "Your first model").click()
    assert browser.find_element("tag name", "h1").text.startswith("Your first model")
    assert "ktc train tiny:qwen3_moe" in browser.find_element("css selector", ".highlight").text
    browser.get(f"{served}/guide/troubleshooting.html")
    browser.find_element("link text", "H221").click()
    assert browser.current_url.endswith("reference/diagnostics.html#h221")
    assert "compiler" in browser.find_element("id", "h221").text
    browser.get(f"{served}/guide/install.html")
    assert "not run by the tests: needs a download" in browser.find_element("tag name", "article").text
    assert not complaints(browser)


def test_the_search_finds_a_code(served: str, browser: Any) -> None:
    browser.get(f"{served}/index.html")
    browser.find_element("css selector", ".md-search__input").send_keys("H206")
    for _ in range(100):
        if "H206" in browser.find_element("css selector", ".md-search-result__list").text:
            break
        time.sleep(0.1)
    else:
        pytest.fail("no result in ten seconds")
    assert not complaints(browser)


def test_pages_fit_their_window(served: str, browser: Any) -> None:
    for page in ("guide/fit", "reference/commands", "reference/python", "benchmarks"):
        browser.get(f"{served}/{page}.html")
        for width in (390, 760, 1400, 1800):
            resize(browser, width)
            assert overflow(browser) <= 0, f"{page} at {width} pixels"


def test_a_page_opens_from_the_disk(site: Path, browser: Any) -> None:
    browser.get((site / "guide" / "fit.html").as_uri())
    assert browser.find_element("tag name", "h1").text.startswith("Will it fit")
    assert not complaints(browser)
