"""Versions promise: what is too old is refused by name before anything is imported, what is newer gets one warning."""

from __future__ import annotations

import json
import tomllib

import pytest
from places import ROOT

from ktc.cli import app as cli
from ktc.diagnostics import HostLacks
from ktc.foundation import versions


def pretend(monkeypatch: pytest.MonkeyPatch, **found: str | None) -> None:
    real = versions.installed
    monkeypatch.setattr(
        versions, "installed", lambda name: found.get(name, real(name)) if name in found else real(name)
    )


def test_what_is_installed_here_is_supported() -> None:
    assert versions.require() == ()


def test_all_that_is_too_old_or_missing_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch="2.10.1+cu128", transformers="4.57.6", peft=None)
    with pytest.raises(HostLacks) as caught:
        versions.require()
    told = [diagnostic.message for diagnostic in caught.value.diagnostics]
    assert [diagnostic.code for diagnostic in caught.value.diagnostics] == ["H230"] * 3
    assert "2.10.1+cu128 is installed" in told[0]
    assert f"`transformers` {versions.range_of('transformers')}" in told[1]
    assert "`peft`" in told[2] and "not installed" in told[2]


def test_the_oldest_release_itself_is_good_and_a_patch_of_the_newest_too(monkeypatch: pytest.MonkeyPatch) -> None:
    oldest, newest = versions.SUPPORTED["transformers"]
    for good in (versions.dotted(oldest), f"{versions.dotted(oldest)}.0", f"{versions.dotted(newest)}.9"):
        pretend(monkeypatch, transformers=good)
        assert versions.require() == ()


def test_something_newer_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, torch="9.0.0")
    (warning,) = versions.require()
    assert (warning.code, warning.severity) == ("H231", "warning")
    assert "9.0.0 is installed" in warning.message


def test_the_command_line_refuses_before_it_imports(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, transformers="4.57.6")
    for arguments in (["check", "moe-lora", "tiny:qwen3_moe"], ["census"], ["graph", "tiny:qwen3_moe"]):
        assert cli.main([*arguments, "--json"]) == 3
        found = json.loads(capfd.readouterr().out)["diagnostics"]
        assert [d["code"] for d in found] == ["H230"]


def test_the_package_asks_for_the_oldest_releases_and_no_newer() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, (oldest, _) in versions.SUPPORTED.items():
        assert f"{name}>={versions.dotted(oldest)}" in project["dependencies"]
