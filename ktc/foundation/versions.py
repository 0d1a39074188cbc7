"""Which versions of torch, transformers and peft ktc works with, and whether the installed ones are among them.

In: the metadata of installed packages; none is imported. Out: release numbers and diagnostics. Releases older than the
oldest lack functions that ktc calls and are refused. Releases newer than the newest tried get a warning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ktc.diagnostics import Diagnostic, HostLacks

__version__ = "0.1.0"  # of ktc itself

Release = tuple[int, ...]

# The oldest release with all that ktc uses, and the newest one tried: `make test-all` runs the tests with both.
SUPPORTED: Mapping[str, tuple[Release, Release]] = {
    "torch": ((2, 11), (2, 15)),
    "transformers": ((5, 6), (5, 23)),
    "peft": ((0, 18), (0, 21)),
}


def require() -> tuple[Diagnostic, ...]:
    """Return a warning (H231) per package newer than those tried. Raises HostLacks (H230): all missing or too old."""
    refused, warnings = list[Diagnostic](), list[Diagnostic]()
    for name, (oldest, newest) in SUPPORTED.items():
        version = installed(name)
        if version is None or release(version) < oldest:
            state = "it is not installed" if version is None else f"{version} is installed"
            message = f"ktc needs `{name}` {range_of(name)}, but {state}"
            refused.append(Diagnostic("H230", message, hint=f"`pip install '{name}~={dotted(newest)}'`"))
        elif release(version)[:2] > newest:
            message = f"ktc was tried with `{name}` {range_of(name)}, and {version} is installed"
            hint = f"if something fails: `pip install '{name}~={dotted(newest)}'`"
            warnings.append(Diagnostic("H231", message, hint=hint, severity="warning"))
    if refused:
        raise HostLacks(*refused)
    return tuple(warnings)


def installed(package: str) -> str | None:
    """Return the version of an installed package, None if it is missing."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def range_of(package: str) -> str:
    """Return `2.11 to 2.13`."""
    return " to ".join(map(dotted, SUPPORTED[package]))


def release(version: str) -> Release:
    """Convert `2.13.0+cpu` to (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0]))


def dotted(numbers: Release) -> str:
    """Convert (2, 13) to `2.13`."""
    return ".".join(map(str, numbers))
