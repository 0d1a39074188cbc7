"""kt-kernel as a peer: in this process if it can be imported, otherwise in a child with its own environment's Python.

The child answers one JSON line per request (`kt_worker.py`). It measures itself, and its machine's limits, since its
figures are shares of those. The child's answers are checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Protocol

from ktc.diagnostics import Diagnostic, HostLacks
from ktc.tools.bench.inputs import Batch
from ktc.tools.bench.layer_requests import KT, Moe, Pass
from ktc.tools.bench.rounds import Seconds
from ktc.tools.measure.limits import Limits, Samples

from . import kt_worker
from .child import Child

# Bytes of a weight in each format that is measured.
FORMATS: Final = {"bf16": 2.0, "int8": 1.0, "int4": 0.5}

NAMES: Final = dict(zip(FORMATS, KT, strict=True))
# Loading a layer takes its longest: packing 45 GB on one thread.
_TIMEOUT_SECONDS: Final = 900
_WORKER: Final = Path(__file__).with_name("kt_worker.py")


class Transport(Protocol):
    """Carries a request to a `kt_worker.Worker` and its answer back. `about` names the kt-kernel that answers."""

    in_process: bool
    about: dict[str, Any]

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Return the answer. Raise `RuntimeError` with kt-kernel's message if it failed."""
        ...


class KtCandidate:
    """One weight format of kt-kernel."""

    isa = ""

    def __init__(self, transport: Transport, weight_format: str, request: Moe) -> None:
        self.about = transport.about
        self.impl = NAMES[weight_format]
        self.expert_bytes = FORMATS[weight_format] * request.shape.expert_weights
        self._transport, self._format = transport, weight_format
        self._samples = Samples()

    def reason_against(self, tokens: int, passes: Pass, rank: int) -> str:
        """Return the reason against a pass: its training classes take bf16 only."""
        if self._format == "bf16" or (passes == "forward" and not rank):
            return ""
        return f"kt-kernel trains {self._format} only from prequantised files"

    def take(self, batches: Sequence[Batch]) -> None:
        """Sends the routings; the rest is random there as here."""
        self._transport.ask("take", routings=[batch.index_TK.tolist() for batch in batches])
        self._samples = Samples()

    def run(self, passes: Pass, rank: int, numbers: Sequence[int]) -> Seconds:
        """By the clocks of the process it runs in."""
        asked = {"weight_format": self._format, "passes": passes, "rank": rank, "numbers": list(numbers)}
        spent = self._transport.ask("run", **asked)
        if not self._transport.in_process:
            found = self._transport.ask("limits")
            self._samples.gflops.append(_number(found, "flops") / 1e9)
            self._samples.gbps.append(_number(found, "bytes") / 1e9)
        return Seconds(_number(spent, "cpu"), _number(spent, "wall"))

    def limits(self, shared: Samples) -> Samples:
        """Return the limits of the child, or of this process."""
        return shared if self._transport.in_process else self._samples


def candidates(request: Moe, limits: Limits, stack: ExitStack) -> Iterator[KtCandidate]:
    """Return candidates of the requested formats, none if kt-kernel is missing and was not named.

    A child measures the same `limits` as this process. It ends with `stack`. Raise HostLacks (H241).
    """
    asked = [name for name, impl in NAMES.items() if impl in request.impls]
    if not asked:
        return
    transport = _transport(request, limits, stack)
    yield from (KtCandidate(transport, name, request) for name in asked)


def _transport(request: Moe, limits: Limits, stack: ExitStack) -> Transport:
    shape = request.shape
    try:
        python = request.kt_python
        transport = InProcess() if python is None else Child(python, _WORKER, _TIMEOUT_SECONDS, stack)
        transport.about = transport.ask(
            "open",
            sizes=[shape.hidden, shape.intermediate, shape.num_experts, shape.top_k],
            threads=request.threads,
            max_tokens=max(request.tokens),
            limits=str(limits.library),
            read_bytes=limits.read_bytes,
        )
    except RuntimeError as error:
        hint = "`ktc explain H241` says how to make an environment for it"
        raise HostLacks(Diagnostic("H241", f"kt-kernel cannot be measured: {error}", hint=hint)) from error
    return transport


class InProcess:
    """kt-kernel in this process."""

    in_process = True

    def __init__(self) -> None:
        self.about: dict[str, Any] = {}
        self._worker: Any = None

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Call the worker's method."""
        self._worker = self._worker or kt_worker.Worker()
        try:
            return getattr(self._worker, do)(**arguments)
        except (ImportError, AttributeError, TypeError, ValueError, OSError) as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _number(answer: dict[str, Any], name: str) -> float:
    """Return a time or a rate. Raise RuntimeError for other values."""
    found = answer.get(name)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found < math.inf:
        raise RuntimeError(f"its process answered `{found}` as {name}")
    return float(found)
