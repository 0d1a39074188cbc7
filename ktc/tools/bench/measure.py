"""The rounds: every candidate once in each, and the machine's limits before each of them; then medians.

In: candidates and a request. Out: rows, and the candidates left out. A failing peer is left out with its
message; a failure of ktc's own kernels ends the run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice

from ktc.tools.bench.candidate import Candidate, Seconds
from ktc.tools.bench.inputs import Batch, batches
from ktc.tools.bench.limits import Limits, Samples
from ktc.tools.bench.report import LeftOut, Row, counterpart
from ktc.tools.bench.request import Pass, Request

Progress = Callable[[int, int, str], None]
"""Rounds that are done, rounds in all, and what is measured now."""

# So few tokens are run through several times in a row, as the layers of a model would.
_MAX_DECODE_TOKENS = 4
_DECODE_CALLS = 4
# Rounds by tokens: the more a round costs, the fewer there are.
_ROUNDS = ((4, 15), (64, 7), (1024, 5))
_FEWEST_ROUNDS = 3


@dataclass(slots=True)
class Case:
    """A candidate in one pass with one rank, and what was measured of it."""

    candidate: Candidate
    passes: Pass
    rank: int
    seconds: list[Seconds] = field(default_factory=list[Seconds])
    num_active: list[float] = field(default_factory=list[float])
    failure: str = ""


def rounds_of(request: Request, tokens: int) -> int:
    """Return the number of counted rounds for this number of tokens; one more before them loads everything."""
    return request.rounds or next((rounds for most, rounds in _ROUNDS if tokens <= most), _FEWEST_ROUNDS)


def measure(
    request: Request, candidates: Sequence[Candidate], limits: Limits, total: Samples, progress: Progress
) -> Iterator[Row | LeftOut]:
    """Rows of each number of tokens in turn; `total` collects the limits of the whole run."""
    num_rounds = sum(rounds_of(request, tokens) + 1 for tokens in request.tokens)
    done = 0
    for tokens in request.tokens:
        left_out, cases = _sorted_out(request, tokens, candidates)
        yield from left_out
        samples, inputs = Samples(), batches(request.shape, tokens)
        _hand_out(cases, inputs)
        for round_number in range(rounds_of(request, tokens) + 1):
            for case in (each for each in cases if not each.failure):
                limits.measure(samples)
                progress(done, num_rounds, f"{tokens} tokens, {case.passes}, {case.candidate.impl}")
                _run(case, inputs, round_number)
            done += 1
        total.extend(samples)
        yield from _rows(request, tokens, cases, samples)


def _sorted_out(request: Request, tokens: int, candidates: Sequence[Candidate]) -> tuple[list[LeftOut], list[Case]]:
    """Split the candidates for this number of tokens into those left out and those measured."""
    left_out, cases = list[LeftOut](), list[Case]()
    for case in _cases(request, candidates):
        reason = case.candidate.reason_against(tokens, case.passes, case.rank)
        if reason:
            left_out.append(LeftOut(case.candidate.impl, case.passes, tokens, case.rank, reason))
        else:
            cases.append(case)
    return left_out, cases


def _cases(request: Request, candidates: Sequence[Candidate]) -> Iterator[Case]:
    for passes in request.passes:
        for rank in request.lora_ranks:
            yield from (Case(candidate, passes, rank) for candidate in candidates)


def _hand_out(cases: Sequence[Case], inputs: Sequence[Batch]) -> None:
    for candidate in {id(case.candidate): case.candidate for case in cases}.values():
        try:
            candidate.take(inputs)
        except RuntimeError as error:
            for case in cases:
                if case.candidate is candidate:
                    _leave_out(case, error)


def _run(case: Case, inputs: Sequence[Batch], round_number: int) -> None:
    """Round 0 loads, packs and allocates, and is not counted."""
    tokens = inputs[0].x_TH.shape[0]
    num_calls = _DECODE_CALLS if tokens <= _MAX_DECODE_TOKENS else 1
    numbers = list(islice(cycle(range(len(inputs))), round_number * num_calls, (round_number + 1) * num_calls))
    try:
        spent = case.candidate.run(case.passes, case.rank, numbers)
    except (RuntimeError, ImportError, AttributeError, TypeError, ValueError) as error:
        _leave_out(case, error)
        return
    if round_number > 0:
        case.seconds.append(Seconds(spent.cpu / num_calls, spent.wall / num_calls))
        case.num_active.append(statistics.mean(inputs[number].num_active for number in numbers))


def _leave_out(case: Case, error: Exception) -> None:
    if case.candidate.impl.startswith("ktc_"):
        raise error
    kind = "" if isinstance(error, RuntimeError) else f"{type(error).__name__}: "
    case.failure = f"it failed: {kind}{next(iter(str(error).splitlines()), 'without a word')}"


def _rows(request: Request, tokens: int, cases: Sequence[Case], samples: Samples) -> Iterator[Row | LeftOut]:
    for case in (each for each in cases if each.failure):
        yield LeftOut(case.candidate.impl, case.passes, tokens, case.rank, case.failure)
    rows = [_row(request, tokens, case, samples) for case in cases if not case.failure]
    for row in rows:
        ours = None if row.impl.startswith("ktc_") else counterpart(row, rows)
        yield replace(row, ktc_speedup=row.ms / ours.ms) if ours else row


def _row(request: Request, tokens: int, case: Case, samples: Samples) -> Row:
    shape, candidate = request.shape, case.candidate
    peak, bandwidth = candidate.limits(samples).median()
    cpu, wall = (statistics.median(getattr(each, name) for each in case.seconds) for name in ("cpu", "wall"))
    clock = "cpu" if request.threads == 1 else "wall"
    seconds = cpu if clock == "cpu" else wall
    gflops = shape.flops(tokens, case.passes) / seconds / 1e9
    sweeps = 1 if case.passes == "forward" else 2
    num_read = 1 if candidate.impl == "onednn_dense" else statistics.mean(case.num_active)
    gbps = sweeps * num_read * candidate.expert_bytes / seconds / 1e9
    return Row(
        impl=candidate.impl,
        passes=case.passes,
        shape=str(shape),
        tokens=tokens,
        ms=seconds * 1e3,
        gflops=gflops,
        share_of_peak=gflops / peak,
        gbps=gbps,
        share_of_bandwidth=gbps / bandwidth,
        isa=candidate.isa,
        lora_rank=case.rank,
        threads=request.threads,
        rounds=len(case.seconds),
        cpu_ms=cpu * 1e3,
        wall_ms=wall * 1e3,
        best_ms=min(getattr(each, clock) for each in case.seconds) * 1e3,
    )
