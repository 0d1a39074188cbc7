"""`make learn`: all of it goes to build/learning; `--docs` also renews what docs/details/learning.md shows of it."""

from __future__ import annotations

import argparse
import os
import warnings
from pathlib import Path

import torch
from transformers.utils import logging

from learning import page, results
from learning.experiment import FULL, QUICK, run
from learning.measured import with_measured
from learning.results import Results

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "details"
MARKS = ("<!-- measured -->\n", "<!-- end of what is measured -->\n")


def main() -> None:
    options = _parser().parse_args()
    folder = options.output.resolve()
    os.environ.setdefault("KTC_CACHE_DIR", str(folder / "cache"))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    torch.set_num_threads(1)  # a model this small only loses time to the second thread
    found = run(folder, QUICK if options.quick else FULL, options.seed)
    results.write(found, folder / "results.json")
    show(found, folder)
    if options.docs:
        text = (DOCS / "learning.md").read_text(encoding="utf-8")
        (DOCS / "learning.md").write_text(with_measured(text, MARKS, page.markdown(found)), encoding="utf-8")
        page.draw(found, DOCS / page.PICTURE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make learn", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "learning")
    parser.add_argument("--quick", action="store_true", help="a minute's worth: one adapter, one task, fewer steps")
    parser.add_argument(
        "--docs", action="store_true", help="renew docs/details/learning.md and docs/details/learning.svg"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser


def show(found: Results, folder: Path) -> None:
    """Print the tables, and write the page and its picture into `folder`."""
    text = page.markdown(found)
    (folder / "learning.md").write_text(text, encoding="utf-8")
    page.draw(found, folder / page.PICTURE)
    print(f"\n{text}\nwritten: {folder / 'learning.md'}, {folder / page.PICTURE}, {folder / 'results.json'}")


if __name__ == "__main__":
    main()
