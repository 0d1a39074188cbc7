"""`run`: from a request to a report. Candidates are made here, in the requested order."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from typing import Any

import torch

from ktc.diagnostics import Diagnostic, HostLacks
from ktc.foundation import host
from ktc.foundation.files import temporary_folder
from ktc.tools.bench import kt, memory, ours, peers
from ktc.tools.bench.candidate import Candidate
from ktc.tools.bench.inputs import Weights
from ktc.tools.bench.limits import Limits, Samples, build_library
from ktc.tools.bench.measure import Progress, measure
from ktc.tools.bench.report import LeftOut, Report, Row
from ktc.tools.bench.request import Request

_NO_KT = "kt-kernel is not in this environment"
_KT_HINT = "`--kt-python` takes the Python of its own environment; `make kt-environment` makes one"
_UNEVEN = "cuts rows into groups or blocks, of which this shape has no whole number"


def run(request: Request, progress: Progress) -> Report:
    """Measures. Raises HostLacks (H240 too little memory, H241 kt-kernel) and what the build of kernels raises."""
    if not kt.is_here(request) and kt.is_required(request):
        raise HostLacks(Diagnostic("H241", f"kt-kernel cannot be measured: {_NO_KT}", hint=_KT_HINT))
    memory.require(request)
    before = torch.get_num_threads()
    torch.set_num_threads(request.threads)
    try:
        with ExitStack() as stack:
            return _run(request, progress, stack)
    finally:
        torch.set_num_threads(before)


def _run(request: Request, progress: Progress, stack: ExitStack) -> Report:
    folder = stack.enter_context(temporary_folder("bench"))
    progress(0, 0, "building kernels")
    limits = Limits(build_library(request.isas[0], folder), request.threads)
    weights = Weights(request.shape)
    of_kt, without_kt = _of_kt(request, limits, stack)
    candidates: list[Candidate] = [*ours.candidates(request, weights), *peers.candidates(request, weights), *of_kt]
    candidates.sort(key=lambda each: request.impls.index(each.impl))
    total = Samples()
    limits.measure(total)
    found = [*absent(request, without_kt), *measure(request, candidates, limits, total, progress)]
    peak, bandwidth = total.median()
    return Report(
        {**_host(request), **({"kt_kernel": of_kt[0].about} if of_kt else {})},
        peak,
        bandwidth,
        tuple(each for each in found if isinstance(each, Row)),
        tuple(each for each in found if isinstance(each, LeftOut)),
    )


def _of_kt(request: Request, limits: Limits, stack: ExitStack) -> tuple[Sequence[kt.KtCandidate], str]:
    """Return kt-kernel's candidates, or the reason for their absence. Raise HostLacks (H241) if it was named."""
    if not kt.is_here(request):
        return (), f"{_NO_KT}: {_KT_HINT}"
    try:
        return tuple(kt.candidates(request, limits, stack)), ""
    except HostLacks as error:
        if kt.is_required(request):
            raise
        return (), "; ".join(each.message for each in error.diagnostics)


def absent(request: Request, without_kt: str = "") -> Iterator[LeftOut]:
    """Return the members of a group that this machine or shape lacks; `without_kt`: the reason for kt-kernel."""
    own = {impl for impl, _ in ours.asked(request)}
    reasons = {impl: _UNEVEN for impl in request.impls if impl.startswith(ours.PREFIX) and impl not in own}
    if without_kt:
        reasons |= {impl: without_kt for impl in request.impls if impl in kt.NAMES}
    everywhere = itertools.product(reasons.items(), request.passes, request.tokens, request.lora_ranks)
    for (impl, reason), passes, tokens, rank in everywhere:
        yield LeftOut(impl, passes, tokens, rank, reason)


def _host(request: Request) -> dict[str, Any]:
    here = host.detect()
    return {
        "cpu": host.cpu_name(),
        "cores": here.cores,
        "isa": list(request.isas),
        "threads": request.threads,
        "clock": "cpu" if request.threads == 1 else "wall",
        **{name: version(name) for name in ("torch", "transformers", "peft")},
        "python": platform.python_version(),
    }
