"""`make docs`: the site builds strictly, and its pages work in a real browser, from the disk and without a network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
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


def test_pages_open_in_a_browser_and_lead_to_each_other(site: Path) -> None:
    with opened_browser() as browser:
        _open(browser, site / "index.html")
        assert browser.find_element("tag name", "h1").text.startswith("Documentation")
        browser.find_element("link text", "Your first model").click()
        assert browser.find_element("tag name", "h1").text.startswith("Your first model")
        assert "ktc train tiny:qwen3_moe" in browser.find_element("css selector", ".language-sh").text
        _open(browser, site / "guide" / "troubleshooting.html")
        browser.find_element("link text", "H221").click()
        assert browser.current_url.endswith("reference/diagnostics.html#h221")
        assert "compiler" in browser.find_element("id", "h221").text
        _open(browser, site / "guide" / "install.html")
        assert "not run by the tests: needs a download" in browser.find_element("tag name", "article").text
        assert not complaints(browser)


def test_pages_fit_their_window(site: Path) -> None:
    with opened_browser() as browser:
        for page in ("guide/fit", "reference/commands", "reference/python", "benchmarks"):
            _open(browser, site / f"{page}.html")
            for width in (390, 760, 1400):
                resize(browser, width)
                assert overflow(browser) <= 0, f"{page} at {width} pixels"


def _open(browser: Any, page: Path) -> None:
    browser.get(page.as_uri())
