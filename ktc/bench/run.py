"""`run`: a request to a report. Candidates are made here, in the order in which they were asked for."""

from __future__ import annotations

import itertools
import platform
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ktc import host
from ktc.bench import kt, memory, ours, peers
from ktc.bench.candidate import Candidate
from ktc.bench.inputs import Weights
from ktc.bench.limits import Limits, Samples, build_library
from ktc.bench.measure import Progress, measure
from ktc.bench.report import LeftOut, Report, Row
from ktc.bench.request import Request
from ktc.diagnostics import Diagnostic, HostLacks

_NO_KT = "kt-kernel is not here: `--kt-python` takes the Python of its own environment"
_UNEVEN = "cuts rows into groups or blocks, of which this shape has no whole number"


def run(request: Request, progress: Progress) -> Report:
    """Measures. Raises HostLacks (H240 too little memory, H241 kt-kernel) and what the build of kernels raises."""
    if not kt.is_here(request) and any(impl in request.required for impl in (*kt.NAMES, "kt", "all")):
        raise HostLacks(Diagnostic("H241", "kt-kernel cannot be measured: it is not in this environment", hint=_NO_KT))
    memory.require(request)
    before = torch.get_num_threads()
    torch.set_num_threads(request.threads)
    try:
        with ExitStack() as stack:
            return _run(request, progress, stack)
    finally:
        torch.set_num_threads(before)


def _run(request: Request, progress: Progress, stack: ExitStack) -> Report:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    progress(0, 0, "building kernels")
    limits = Limits(build_library(request.isas[0], folder), request.threads)
    weights = Weights(request.shape)
    of_kt = tuple(kt.candidates(request, limits.library, stack)) if kt.is_here(request) else ()
    candidates: list[Candidate] = [*ours.candidates(request, weights), *peers.candidates(request, weights), *of_kt]
    candidates.sort(key=lambda each: request.impls.index(each.impl))
    total = Samples()
    limits.measure(total)
    found = [*absent(request), *measure(request, candidates, limits, total, progress)]
    peak, bandwidth = total.median()
    return Report(
        {**_host(request), **({"kt_kernel": of_kt[0].about} if of_kt else {})},
        peak,
        bandwidth,
        tuple(each for each in found if isinstance(each, Row)),
        tuple(each for each in found if isinstance(each, LeftOut)),
    )


def absent(request: Request) -> Iterator[LeftOut]:
    """What a group or the default has and this machine or this shape has not."""
    own = {impl for impl, _ in ours.asked(request)}
    reasons = {impl: _UNEVEN for impl in request.impls if impl.startswith(ours.PREFIX) and impl not in own}
    if not kt.is_here(request):
        reasons |= {impl: _NO_KT for impl in request.impls if impl in kt.NAMES}
    everywhere = itertools.product(reasons.items(), request.passes, request.tokens, request.lora_ranks)
    for (impl, reason), passes, tokens, rank in everywhere:
        yield LeftOut(impl, passes, tokens, rank, reason)


def _host(request: Request) -> dict[str, Any]:
    here = host.detect()
    cpu = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": here.cores,
        "isa": list(request.isas),
        "threads": request.threads,
        "clock": "cpu" if request.threads == 1 else "wall",
        **{name: version(name) for name in ("torch", "transformers", "peft")},
        "python": platform.python_version(),
    }
