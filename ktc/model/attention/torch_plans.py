"""Attention of PyTorch without cuDNN, for calls whose lengths seldom repeat.

On GPUs from Hopper on, `scaled_dot_product_attention` prefers cuDNN, which builds a plan for every new shape. A server
meets another length with nearly every prompt, and would wait for a plan each time. The other kernels need none.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def without_plans() -> Generator[None]:
    """Keep cuDNN out of the choice of attention kernels, in this process, while the block runs."""
    cuda = torch.backends.cuda
    was_enabled = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(was_enabled)
