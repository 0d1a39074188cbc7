"""The data that ktc ships, by name, so that a first run needs no file: `--data capitals`."""

from __future__ import annotations

from pathlib import Path

from ktc.foundation import resources

SUFFIX = ".jsonl"


def names() -> tuple[str, ...]:
    """Return the names of the bundled data files."""
    return tuple(sorted(path.stem for path in resources.training_data().glob(f"*{SUFFIX}")))


def data_file(named: Path) -> Path:
    """Return the bundled file of that name, or `named` itself if it exists or no bundled file has its name."""
    bundled = resources.training_data() / f"{named}{SUFFIX}"
    return bundled if str(named) in names() and not named.exists() else named
