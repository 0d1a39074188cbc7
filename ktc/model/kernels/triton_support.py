"""Whether Triton compiles the kernels of ktc for a device, which is asked before they are imported."""

from __future__ import annotations

import importlib.util
from typing import Final

import torch

OLDEST: Final = (8, 0)  # compute capability of the GPUs for which Triton compiles bf16, and PyTorch grouped products


def lacking(device: torch.device) -> str:
    """Return why kernels by Triton do not run on a device, "" if they do. On a CPU its interpreter runs them."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST:
        return f"{device} is older than the kernels"
    return ""
