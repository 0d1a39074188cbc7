"""Every relative link of a page leads to a file, and every anchor to a heading; tables are whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pages import DOCS, GUIDE, PAGES, anchors, links, tables, title
from places import ROOT
from reference_pages import pages as generated_pages

GENERATED = {DOCS / path: text for path, text in generated_pages().items()}


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_links_lead_to_pages_and_anchors_that_exist(page: Path) -> None:
    broken = [target for target in links(page.read_text(encoding="utf-8")) if not _leads_somewhere(page, target)]
    assert not broken


def test_links_of_generated_pages_lead_somewhere() -> None:
    for page, text in GENERATED.items():
        assert not [target for target in links(text) if not _leads_somewhere(page, target)]


def _leads_somewhere(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if file not in GENERATED and not file.exists():
        return False
    text = GENERATED.get(file) or (file.read_text(encoding="utf-8") if file.suffix == ".md" else "")
    return not anchor or anchor in anchors(text)


def test_outside_the_site_no_link_leads_to_a_generated_page() -> None:
    for page in PAGES:
        if page.parent != DOCS / "reference":
            targets = {(page.parent / target.partition("#")[0]).resolve() for target in links(page.read_text("utf-8"))}
            assert not targets & GENERATED.keys(), f"{title(page)}: those pages are not in the repository"


def test_the_guide_has_at_most_ten_pages_and_every_page_is_in_the_navigation() -> None:
    assert len(GUIDE) <= 10
    source = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(_paths(yaml.safe_load(source)["nav"]))
    assert listed == {page.relative_to(DOCS).as_posix() for page in (*DOCS.rglob("*.md"), *GENERATED)}


def _paths(entry: object) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    inner = entry.values() if isinstance(entry, dict) else entry
    assert isinstance(inner, list) or hasattr(inner, "__iter__")
    return [path for part in inner for path in _paths(part)]  # pyright: ignore[reportGeneralTypeIssues]


def test_generated_pages_have_every_command_target_and_code() -> None:
    from ktc.language.explain import explanations
    from ktc.model.targets import TARGETS

    commands, targets, codes = (GENERATED[DOCS / "reference" / f"{name}.md"] for name in _NAMES)
    assert "### ktc train" in commands and "### ktc bench moe" in commands
    assert all(f"### {name}\n" in targets for name in TARGETS)
    assert {code.lower() for code in explanations()} <= anchors(codes)


_NAMES = ("commands", "targets", "diagnostics")


@pytest.mark.parametrize("page", [*PAGES, *GENERATED], ids=title)
def test_rows_of_a_table_have_the_cells_of_its_head(page: Path) -> None:
    text = GENERATED.get(page) or page.read_text(encoding="utf-8")
    for table in tables(text):
        counts = {len(re.findall(r"(?<!\\)\|", row)) for row in table}
        assert len(counts) == 1, f"{counts} in the table of `{table[0]}`"
