"""Whether Triton compiles the kernels of ktc for a device, which is asked before they are imported.

Some are in Gluon, a part of Triton that may change or be missing: others compute the same without it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from typing import Final

import torch

log = logging.getLogger(__name__)

OLDEST: Final = (8, 0)  # compute capability of the GPUs for which Triton compiles bf16, and PyTorch grouped products


def lacking(device: torch.device) -> str:
    """Return why kernels by Triton do not run on a device, "" if they do. On a CPU its interpreter runs them."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST:
        return f"{device} is older than the kernels"
    return ""


@functools.cache
def has_gluon() -> bool:
    """Return whether Triton has Gluon. A log says once that it does not."""
    try:
        importlib.import_module("triton.experimental.gluon.language")
    except ImportError as error:
        log.warning("few rows are multiplied by slower kernels: this release of Triton has no Gluon (%s)", error)
        return False
    return True
