"""A wheel that is built from the sdist works where there is no checkout.

It carries the grammar, the templates, the headers and the rules.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from places import ROOT

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("hatchling"), reason="hatchling is not installed")


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(sdist, folder, filter="data")
    source = folder / sdist.name.removesuffix(".tar.gz")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=source)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of a fresh environment with the wheel alone; its dependencies are those of this environment."""
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_the_lock_has_the_tested_versions_with_hashes_but_torch() -> None:
    """`make lock` renews it. Each build of torch has hashes of its own (docs/design.md, "Versions")."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = {line.lower().replace("_", "-") for line in lines if not line.startswith(("#", "torch=="))}
    entries = re.split(r"\n(?=\S)", (ROOT / "requirements.lock").read_text().strip())
    locked = {entry.split()[0].lower().replace("_", "-"): entry for entry in entries if not entry.startswith("#")}
    assert locked.keys() == tested, "run `make lock`"
    assert all("--hash=sha256:" in entry for entry in locked.values())


def test_wheel_carries_the_data_folders(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for kind, ending in (
        ("grammar", ".lark"),
        ("templates", ".j2"),
        ("runtime/include/ktc", ".hpp"),
        ("runtime/python/ktc_python", ".hpp"),
        ("runtime/python", "module.cpp"),
        ("rules/std", ".ktr"),
    ):
        assert any(name.startswith(f"ktc/_data/{kind}/") and name.endswith(ending) for name in names), kind
    assert "ktc/py.typed" in names


def test_installed_wheel_is_what_runs(installed: Path, tmp_path: Path) -> None:
    where = run(installed / "python", "-c", "import ktc; print(ktc.__file__)", cwd=tmp_path)
    assert where.startswith(str(installed.parent))
    assert run(installed / "ktc", "--version", cwd=tmp_path).startswith("ktc ")
    assert "compile" in run(installed / "ktc", "--help", cwd=tmp_path)


def test_installed_wheel_checks_a_bundled_rule(installed: Path, tmp_path: Path) -> None:
    run(installed / "ktc", "check", "moe-lora", cwd=tmp_path)


@pytest.mark.slow
def test_installed_wheel_compiles_and_runs_a_model(installed: Path, tmp_path: Path) -> None:
    run(installed / "ktc", "compile", "tiny:deepseek_v2", "moe-lora", "-o", "compiled_twin", cwd=tmp_path)
    code = "import compiled_twin as c, torch; print(c.load()(torch.arange(8)[None]).logits.isfinite().all().item())"
    assert run(installed / "python", "-c", code, cwd=tmp_path).strip() == "True"
