"""Which product of frozen linear layers this processor takes, by measurement: torch's in bf16, or ktc's in fp32.

torch multiplies bf16 well where the processor has instructions for it. Elsewhere it reaches a quarter of the speed of
fp32 (docs/benchmarks.md). In: a product of ktc, or torch's own in fp32 to predict it. Out: a `Choice`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from ktc.foundation import environment
from ktc.foundation.decode import Undecodable, decode, read_json
from ktc.foundation.files import write_file
from ktc.foundation.host import cpu_name
from ktc.foundation.regular_files import read_regular

log = logging.getLogger(__name__)

Multiply = Callable[[Tensor, Tensor], Tensor]
_MARGIN: Final = 1.15  # a smaller gain is within the noise of a busy machine, and would differ from run to run
_ROWS, _SIZE, _ROUNDS = 256, 1024, 3


@dataclass(frozen=True, slots=True)
class Choice:
    """Speeds of the forward product of a linear layer, in GFLOP/s: torch's in bf16, and the other one."""

    torch: float
    other: float

    @property
    def packed(self) -> bool:
        """Whether ktc's product is taken."""
        return self.other > _MARGIN * self.torch

    def __str__(self) -> str:
        taken = "packed" if self.packed else "torch"
        return f"{taken} (torch {self.torch:.0f} GFLOP/s, packed {self.other:.0f}: measured in bf16)"


def kept_choice(of: str, measure: Callable[[], Choice]) -> Choice:
    """Return the choice that an earlier process kept for `of` on this processor, or measure and keep it.

    So processes on one machine choose alike, and a resumed run computes the same as the first one.
    """
    key = json.dumps((of, cpu_name(), torch.__version__))
    path = environment.cache_dir() / "choices" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    try:
        return decode(read_json(read_regular(path)), Choice)
    except (OSError, ValueError, Undecodable):  # missing, or changed
        choice = measure()
    with contextlib.suppress(OSError):  # a cache that cannot be written is one measurement per process
        write_file(path, json.dumps(asdict(choice)))
    return choice


def measured_choice(packed: Multiply) -> Choice:
    """Measure ktc's product beside torch's, in about 0.2 s of one thread, and log the result."""
    choice = _measured(packed, torch.bfloat16)
    log.info("linear layers with many rows: %s", choice)
    return choice


def predicted_choice() -> Choice:
    """Return the same with torch's product in fp32, whose speed is about that of ktc's: needs no kernel."""
    return _measured(functional.linear, torch.float32)


def _measured(other: Multiply, dtype: torch.dtype) -> Choice:
    """Take turns, so that a busy machine slows both. The quickest round of each counts."""
    x, weight = (torch.ones(size, dtype=torch.bfloat16, device="cpu") for size in ((_ROWS, _SIZE), (_SIZE, _SIZE)))
    others = x.to(dtype), weight.to(dtype)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        times = [
            (_seconds(lambda: functional.linear(x, weight)), _seconds(lambda: other(*others)))
            for _ in range(1 + _ROUNDS)
        ]
    flops = 2e-9 * _ROWS * _SIZE * _SIZE
    ours, theirs = (flops / min(rounds[1:]) for rounds in zip(*times, strict=True))  # the first round warms up
    return Choice(ours, theirs)


def _seconds(multiply: Callable[[], Tensor]) -> float:
    began = time.perf_counter()
    multiply()
    return time.perf_counter() - began
