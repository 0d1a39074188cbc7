"""The layers import downwards only, and importing ktc costs nothing."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

# Where the compiled world must not be needed: importing any of these fails.
BLOCKED = "import sys; [sys.modules.__setitem__(name, None) for name in ('torch', 'transformers', 'peft', 'numpy')]; "


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, env=environment
    )


def test_import_contracts_hold() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    if not linter.exists():
        pytest.skip("import-linter is not installed")
    done = subprocess.run([linter, "--no-logo"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_importing_ktc_needs_no_torch_and_does_nothing(tmp_path: Path) -> None:
    code = (
        BLOCKED + "before = set(sys.modules); import ktc; print(sorted(m for m in sys.modules if m.startswith('ktc')))"
    )
    assert python(code).stdout == "['ktc']\n"


def test_importing_ktc_is_quick() -> None:
    code = "import time; start = time.process_time(); import ktc; print(time.process_time() - start)"
    assert float(python(code).stdout) < 0.3


def test_the_public_names_are_all_there() -> None:
    code = "import ktc; assert all(callable(getattr(ktc, name)) for name in ktc.__all__[2:]); ktc.nothing"
    with pytest.raises(subprocess.CalledProcessError) as caught:
        python(code)
    assert "module `ktc` has no attribute `nothing`" in caught.value.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["compile", "--help"], ["--version"]])
def test_command_line_help_needs_no_torch(arguments: list[str]) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert python(BLOCKED + "from ktc.cli.app import main; sys.exit(main(sys.argv[1:]))", *arguments).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)  # processor time: other tests run beside this one
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 3


def test_no_file_reads_the_environment_but_its_own_and_cli() -> None:
    readers = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "ktc").rglob("*.py")
        if any(name in path.read_text(encoding="utf-8") for name in ("os.environ", "os.getenv", "getenv("))
    ]
    assert set(readers) <= {"ktc/environment.py", "ktc/cli/app.py", "ktc/cli/session.py"}
