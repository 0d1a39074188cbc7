"""The packages of training, which `ktc` alone does not install; none is imported here, nor torch.

In: their names. Refused: those that are not installed (H230).
"""

from __future__ import annotations

from typing import Final

from ktc.diagnostics import Diagnostic, HostLacks
from ktc.foundation import versions

_OF_TRAINING: Final = ("accelerate", "datasets", "trl")  # of the extra `train`


def require_packages(*names: str) -> None:
    """Raise HostLacks (H230) for packages that are not installed: those of training, or `names` to read data."""
    missing = [f"`{name}`" for name in names or _OF_TRAINING if versions.installed(name) is None]
    if missing:
        message = f"{'this data' if names else 'training'} requires {', '.join(missing)}, not installed here"
        raise HostLacks(Diagnostic("H230", message, hint="`pip install 'ktc[train]'`"))
