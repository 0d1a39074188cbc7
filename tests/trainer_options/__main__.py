"""The table of the trainers' options: each value alone, and seeded pairs, on a compiled model beside stock.

`make trainer-options` runs all; `make trainer-options CASES="dpo:* sft:loss_type*"` some. The exit status is 1 if a row
is not equal.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import warnings
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import datasets
import torch
import transformers
from places import ROOT

import ktc
from trainer_options.cases import CASES
from trainer_options.option import Untried
from trainer_options.runs import Models, Run, compare, difference
from trainer_options.trainers import KINDS


def main(patterns: list[str]) -> int:
    """Print a row for each case whose `trainer:name` matches a pattern, or for every case without a pattern."""
    chosen = [case for case in CASES if not patterns or any(fnmatch(case.id, pattern) for pattern in patterns)]
    verdicts, wrong, defaults = Counter[str](), list[str](), dict[str, Run]()
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        models = Models.of(ktc.compile("tiny:qwen3_moe", "moe-lora", Path(folder) / "out"))
        gc.collect()
        gc.freeze()  # every run looks for garbage
        for case in chosen:
            for row in compare(case, models):
                base = defaults.setdefault(case.kind, row.stock)
                print(f"{row}{'' if _changes(base, row.stock) else ', as without it'}", flush=True)
                verdicts[row.verdict.partition(":")[0]] += 1
                wrong += [] if row.right else [case.id]
    if not patterns:
        _tell_untried()
    print(f"{len(chosen)} cases, {verdicts.total()} rows: {', '.join(f'{n} {what}' for what, n in verdicts.items())}")
    print(f"{len(wrong)} not as stock{': ' if wrong else ''}{', '.join(wrong)}")
    return 1 if wrong else 0


def _changes(base: Run, run: Run) -> bool:
    """Return whether an option changes the numbers of stock code; the first case of a trainer is its defaults."""
    return bool(run.raised) or difference(base.logged, run.logged) + difference(base.weights, run.weights) > 0


def _tell_untried() -> None:
    """Print the options that are not tried, by reason."""
    reasons = dict[str, dict[str, None]]()
    for kind in KINDS.values():
        for name, option in kind.options.items():
            if isinstance(option, Untried):
                reasons.setdefault(option.reason, {})[name] = None
    for reason, names in reasons.items():
        print(f"not tried ({reason}): {', '.join(names)}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
