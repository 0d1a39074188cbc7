"""The zoo as a table: every family and its near-twin, what was expected, what was found, and the worst error.

`make zoo` runs all; `make zoo CASES="layer_* null_experts"` some. The exit status is 1 if one is not as expected.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path

import cached_compiler
import torch
from places import OBJECTS, ROOT

from invented.compared import compare
from invented.family import Case
from invented.surroundings import code_of_models_below
from invented.zoo import CASES
from ktc.foundation.host import find_compiler


def main(patterns: list[str]) -> int:
    """Print a row for each case whose name matches one of the patterns, or for every case without a pattern."""
    chosen = [case for case in CASES if not patterns or any(fnmatch(case.name, pattern) for pattern in patterns)]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["KTC_CACHE_DIR"] = str(folder / "cache")
        compiler = find_compiler()
        if compiler is not None:
            quick = cached_compiler.installed(folder, compiler.path, compiler.version, OBJECTS, cached_compiler.QUICK)
            os.environ["CXX"] = str(quick)
        (folder / "modules").mkdir()
        with code_of_models_below(folder / "modules"):
            wrong = [case.name for case in chosen if not _row(case, folder)]
    print(f"{len(chosen)} models, {len(wrong)} not as expected{': ' if wrong else ''}{', '.join(wrong)}")
    return 1 if wrong else 0


def _row(case: Case, folder: Path) -> bool:
    """Print the row of one case and return whether it is as expected."""
    start = time.monotonic()
    try:
        found = compare(case, folder)
    except Exception as error:  # noqa: BLE001 - an exception that is no refusal is a result, and the run goes on
        print(f"RAISED {case.name:28} {type(error).__name__}: {error}".partition("\n")[0], flush=True)
        return False
    _, worst = found.worst
    met = case.is_met_by(found.outcome, found.attention) and not found.faults
    ratio = max((ours / theirs for ours, theirs in found.kernel.values()), default=0.0)
    print(
        f"{'ok' if met else 'WRONG':6} {case.name:28} {time.monotonic() - start:4.0f} s  worst {worst:.0e}  "
        f"kernel {ratio:4.2f}  expected: {case.expected}  found: {found.outcome:.160}"
        f"{f'; attention: {found.attention:.160}' if found.attention else ''}",
        flush=True,
    )
    for fault in found.faults[:8]:
        print(f"         {fault}", flush=True)
    return met


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
