"""`ktc bench moe`: the routed experts of one layer beside their peers.

In: a request. Out: a report of medians of rounds, in which every candidate runs once. A failing peer is left out with
its message; a failure of ktc's own kernels ends the run. Refused: experts that do not fit (H240), a peer that was named
and is missing (H241, U014), and what the build of kernels refuses.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import psutil

from ktc.diagnostics import Diagnostic, HostLacks, InputRefused, KtcError
from ktc.foundation import host
from ktc.foundation.files import temporary_folder
from ktc.model.kernels.packed_size import packed_bytes
from ktc.stages.plan.placement import gib
from ktc.tools.bench import ours
from ktc.tools.bench.candidate import Candidate
from ktc.tools.bench.inputs import Batch, Weights, batches
from ktc.tools.bench.layer_requests import DENSE, HF, KT, KTC, PEERS, Moe, Pass
from ktc.tools.bench.machine import processor
from ktc.tools.bench.peers import peer
from ktc.tools.bench.plot import Point, roofline
from ktc.tools.bench.progress import ProgressSink
from ktc.tools.bench.report import ComparisonReport, LeftOut, column, table_of, threads_and_clock
from ktc.tools.bench.rounds import Seconds, failure, in_turns, milliseconds
from ktc.tools.measure.figures import threads_of_torch
from ktc.tools.measure.limits import Limits, Samples, build_library

if TYPE_CHECKING:
    from rich.table import Table

# So few tokens are run through several times in a row, as the layers of a model would.
_MAX_DECODE_TOKENS = 4
_DECODE_CALLS = 4
# Rounds by tokens: the more a round costs, the fewer there are.
_ROUNDS = ((4, 15), (64, 7), (1024, 5))
_FEWEST_ROUNDS = 3
_BASE = 2**30  # bytes: imports, the buffer that is read, what a compiler takes
_KT_BYTES = dict(zip(KT, (2.0, 1.0, 0.5), strict=True))  # of a weight
_NO_KT = "kt-kernel is not in this environment"
_KT_HINT = "`--kt-python` takes the Python of its own environment; `make kt-environment` makes one"
_UNEVEN = "cuts rows into groups or blocks, of which this shape has no whole number"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One implementation at one number of tokens.

    `ms` is `cpu_ms` with one thread and `wall_ms` with more, medians of the rounds; `best_ms` is the quickest round:
    peers that spin suffer most from other work on the machine. `gflops` counts the products of the routed experts,
    not those of LoRA; `gbps` the weights of the experts in use in their stored format, once for each pass over them.
    `ktc_speedup`: the speed of ktc's own kernel of that format relative to this row (None for ktc's own rows).
    """

    passes: Pass = column("pass", left=True)
    tokens: int = column("tokens", "{:,}")
    lora_rank: int = column("LoRA", lambda row: str(row.lora_rank or ""))
    impl: str = column("implementation", left=True)
    ms: float = column("ms", "{:,.2f}")
    gflops: float = column("GFLOP/s", "{:,.0f}")
    share_of_peak: float = column("of peak", "{:.3f}")
    gbps: float = column("GB/s", "{:.1f}")
    share_of_bandwidth: float = column("of read", "{:.3f}")
    ktc_speedup: float | None = column("ktc is", "{:.2f}x as fast", default=None)
    shape: str
    lora_dropout: float = 0.0
    isa: str
    threads: int
    rounds: int
    cpu_ms: float
    wall_ms: float
    best_ms: float

    @property
    def group(self) -> tuple[int, Pass, int]:
        """Rows of one group answer the same question and may be compared."""
        return self.tokens, self.passes, self.lora_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeReport(ComparisonReport):
    """`host` describes machine and versions; the limits are medians over the run."""

    host: Mapping[str, Any]
    peak_gflops: float
    read_gbps: float

    def to_json(self) -> dict[str, Any]:
        """Return the object of `--json`, where the pass is called `pass`."""
        report = ComparisonReport.to_json(self)
        for row in report["rows"]:
            row["pass"] = row.pop("passes")
        return report

    def shown(self) -> Iterator[str | Table]:
        """Yield the limits that the columns are shares of, the rows, and a line for each reason against measuring."""
        if self.rows:
            several = len({row.isa for row in self.rows if row.isa}) > 1
            named = [replace(row, impl=f"{row.impl} {row.isa}".strip()) if several else row for row in self.rows]
            where = f"{self.rows[0].shape} on {self.host['cpu']}, {', '.join(self.host['isa'])}"
            limits = f"peak {self.peak_gflops:.0f} GFLOP/s, read {self.read_gbps:.1f} GB/s"
            yield f"{where}: {threads_and_clock(self.host)}; {limits}"
            yield table_of(sorted(named, key=lambda row: row.group), lambda row: row.group)
        else:
            yield "nothing was measured"
        yield from self.not_measured()

    def figure(self) -> Any:
        """Return the roofline: what each implementation reached over its operations per byte of weights."""
        here, threads = self.host, self.host["threads"]
        shape = self.rows[0].shape if self.rows else "nothing measured"
        title = f"{shape}, {here['cpu']}, {', '.join(here['isa'])}, {threads} thread{'s' * (threads > 1)}"
        points = [
            Point(
                row.gflops / row.gbps,
                row.gflops,
                f"{row.impl} {row.isa}".strip(),
                row.passes + f", LoRA r={row.lora_rank}" * bool(row.lora_rank),
                row.tokens,
            )
            for row in self.rows
        ]
        return roofline(title, points, self.peak_gflops, self.read_gbps)


@dataclass(frozen=True, slots=True)
class _Case:
    """A candidate in one pass with one rank on some batches, and the experts that had a token in each round."""

    candidate: Candidate
    passes: Pass
    rank: int
    inputs: Sequence[Batch]
    num_active: list[float] = field(default_factory=list[float])

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.passes}, {self.candidate.impl}"

    @property
    def tokens(self) -> int:
        return self.inputs[0].x_TH.shape[0]

    def run(self, round_number: int) -> Seconds:
        """Run the batches of a round, and return the seconds of one."""
        calls = _DECODE_CALLS if self.tokens <= _MAX_DECODE_TOKENS else 1
        numbers = [(round_number * calls + call) % len(self.inputs) for call in range(calls)]
        self.num_active.append(statistics.mean(self.inputs[number].num_active for number in numbers))
        return self.candidate.run(self.passes, self.rank, numbers) / calls


def run(request: Moe, sink: ProgressSink) -> MoeReport:
    """Measure."""
    if request.requires_kt and not request.has_kt:
        raise HostLacks(Diagnostic("H241", f"kt-kernel cannot be measured: {_NO_KT}", hint=_KT_HINT))
    require_room(request)
    with ExitStack() as stack, threads_of_torch(request.threads):
        folder = stack.enter_context(temporary_folder("bench"))
        sink.progress("building kernels", 0, 0)
        limits, weights = Limits(build_library(request.isas[0], folder), request.threads), Weights(request.shape)
        others, reasons, about = _peers(request, weights, limits, stack)
        candidates: list[Candidate] = [*ours.candidates(request, weights), *others]
        candidates.sort(key=lambda entry: request.impls.index(entry.impl))
        total = Samples()
        limits.measure(total)
        results = [*absent(request, reasons), *_measure(request, candidates, limits, total, sink)]
    peak, bandwidth = total.median()
    return MoeReport.of(
        results,
        host={**processor(list(request.isas), request.threads, "peft"), **about},
        peak_gflops=peak,
        read_gbps=bandwidth,
    )


def absent(request: Moe, without: Mapping[str, str]) -> Iterator[LeftOut]:
    """Yield the formats that the shape cannot have, and the peers `without` with their reasons."""
    kernels = {impl for impl, _ in ours.kernels_of(request)}
    reasons = {impl: _UNEVEN for impl in request.impls if impl.startswith(KTC) and impl not in kernels}
    everywhere = itertools.product({**reasons, **without}.items(), request.passes, request.tokens, request.lora_ranks)
    for (impl, reason), passes, tokens, rank in everywhere:
        yield left_out(impl, reason, passes, tokens, rank)


def left_out(impl: str, reason: str, passes: Pass, tokens: int, rank: int) -> LeftOut:
    """Return that an implementation was not measured in one group, and why."""
    where = f"{passes} {tokens:,}" + f" r{rank}" * bool(rank)
    return LeftOut(impl, reason, where, {"pass": passes, "tokens": tokens, "lora_rank": rank})


def _peers(
    request: Moe, weights: Weights, limits: Limits, stack: ExitStack
) -> tuple[list[Candidate], dict[str, str], dict[str, Any]]:
    """Return the peers, the reasons for missing ones, and facts about their versions. Raise HostLacks (H241, U014)."""
    named = [impl for impl in request.impls if impl in PEERS]
    of_kt = [impl for impl in named if impl in KT]
    if not named:
        return [], {}, {}
    try:
        others = list(peer("experts").candidates(request, weights))
    except InputRefused as error:
        if any(not word.startswith(KTC) for word in request.required):
            raise
        return [], dict.fromkeys(named, _words_of(error)), {}
    if not of_kt:
        return others, {}, {}
    if not request.has_kt:
        return others, dict.fromkeys(of_kt, f"{_NO_KT}: {_KT_HINT}"), {}
    try:
        of_kt_kernel = list(peer("kt").candidates(request, limits, stack))
    except HostLacks as error:
        if request.requires_kt:
            raise
        return others, dict.fromkeys(of_kt, _words_of(error)), {}
    return [*others, *of_kt_kernel], {}, {"kt_kernel": of_kt_kernel[0].about}


def _words_of(error: KtcError) -> str:
    return "; ".join(entry.message for entry in error.diagnostics)


def rounds_of(request: Moe, tokens: int) -> int:
    """Return the number of counted rounds for this number of tokens."""
    return request.rounds or next((rounds for most, rounds in _ROUNDS if tokens <= most), _FEWEST_ROUNDS)


def _measure(
    request: Moe, candidates: Sequence[Candidate], limits: Limits, total: Samples, sink: ProgressSink
) -> Iterator[Row | LeftOut]:
    """Yield rows of each number of tokens in turn; `total` collects the limits of the whole run."""
    for place, tokens in enumerate(request.tokens):
        inputs, failed = batches(request.shape, tokens), dict[int, str]()
        for candidate in candidates:
            try:
                candidate.take(inputs)
            except RuntimeError as error:
                failed[id(candidate)] = failure(error)
        cases = list[_Case]()
        for passes, rank, candidate in itertools.product(request.passes, request.lora_ranks, candidates):
            case = _Case(candidate, passes, rank, inputs)
            reason = candidate.reason_against(tokens, passes, rank) or failed.get(id(candidate), "")
            if rank and request.lora_dropout and not candidate.impl.startswith(KTC):
                reason = reason or "has no dropout of LoRA on experts"
            if reason:
                yield left_out(candidate.impl, reason, passes, tokens, rank)
            else:
                cases.append(case)
        yield from _turns(request, cases, limits, total, sink.at(place, len(request.tokens)))


def _turns(
    request: Moe, cases: Sequence[_Case], limits: Limits, total: Samples, observe: Callable[[str], None]
) -> Iterator[Row | LeftOut]:
    """Yield the rows of one number of tokens."""
    if not cases:
        return
    turns = in_turns(
        {number: case.run for number, case in enumerate(cases)},
        rounds_of(request, cases[0].tokens),
        limits,
        lambda number: observe(str(cases[number])),
        peers={number for number, case in enumerate(cases) if not case.candidate.impl.startswith(KTC)},
    )
    total.extend(turns.samples)
    for number, reason in turns.failures.items():
        case = cases[number]
        yield left_out(case.candidate.impl, reason, case.passes, case.tokens, case.rank)
    measured = ((case, turns.seconds[number]) for number, case in enumerate(cases) if number not in turns.failures)
    rows = [_row(request, case, spent, turns.samples) for case, spent in measured]
    for row in rows:
        ktc_row = None if row.impl.startswith(KTC) else counterpart(row, rows)
        yield replace(row, ktc_speedup=row.ms / ktc_row.ms) if ktc_row else row


def counterpart(row: Row, rows: Iterable[Row]) -> Row | None:
    """Return ktc's own row to compare a peer's with: of the same format, and of the first instruction set.

    Peers without a format in their name compute in bf16; without ktc's bf16, its first format is used.
    """
    ktc_rows = [entry for entry in rows if entry.group == row.group and entry.impl.startswith(KTC)]
    _, _, suffix = row.impl.partition("kt_kernel_")
    of_format = [entry for entry in ktc_rows if entry.impl == f"{KTC}{suffix or 'bf16'}"]
    return next(iter(of_format if suffix else of_format or ktc_rows), None)


def _row(request: Moe, case: _Case, spent: Sequence[Seconds], samples: Samples) -> Row:
    candidate, times = case.candidate, milliseconds(spent, request.threads)
    peak, bandwidth = candidate.limits(samples).median()
    seconds = times["ms"] / 1e3
    gflops = request.shape.flops(case.tokens, case.passes) / seconds / 1e9
    sweeps = 1 if case.passes == "forward" else 2
    num_read = 1 if candidate.impl == DENSE else statistics.mean(case.num_active[1:])  # those of round 0 do not count
    gbps = sweeps * num_read * candidate.expert_bytes / seconds / 1e9
    return Row(
        impl=candidate.impl,
        passes=case.passes,
        shape=str(request.shape),
        tokens=case.tokens,
        gflops=gflops,
        share_of_peak=gflops / peak,
        gbps=gbps,
        share_of_bandwidth=gbps / bandwidth,
        isa=candidate.isa,
        lora_rank=case.rank,
        lora_dropout=request.lora_dropout if case.rank else 0.0,
        threads=request.threads,
        rounds=len(spent),
        **times,
    )


def require_room(request: Moe) -> None:
    """Raise HostLacks (H240) with the missing bytes and the number of experts that would fit."""
    available = min(psutil.virtual_memory().available, host.detect().memory)
    wanted = needed(request)
    if wanted <= available:
        return
    halves = [request.shape.num_experts >> step for step in range(1, request.shape.num_experts.bit_length())]
    smaller = [number for number in halves if number >= request.shape.top_k]
    fitting = next((number for number in smaller if needed(replace(request, experts=number)) <= available), 0)
    message = f"these experts need {gib(wanted)} of memory in the requested forms, and {gib(available)} are free"
    fewer = f"`--experts {fitting}` would fit; or ask" if fitting else "ask"
    raise HostLacks(Diagnostic("H240", message, hint=f"{fewer} for fewer implementations with `--impl`"))


def needed(request: Moe) -> int:
    """Return an estimate of the bytes that all candidates hold at once, their activations included."""
    shape = request.shape
    stacked = 2 * shape.num_experts * shape.expert_weights
    activations = 16 * max(request.tokens) * shape.top_k * (shape.intermediate + shape.hidden)
    packed = sum(packed_bytes(spec) for _, spec in ours.kernels_of(request))
    copies = 0.0
    if not {*request.impls}.isdisjoint({*PEERS} - {*KT}):
        # PEFT makes B A, its sum with the weights and, in training, the gradient of that: in turn, not for each peer.
        copies += 1 + 3 * (any(request.lora_ranks) and not {*request.impls}.isdisjoint(HF))
    formats = [size for impl, size in _KT_BYTES.items() if impl in request.impls]
    if formats and request.has_kt:
        # Its input and the form of each of its classes; those for training keep the weights and their transpose.
        classes = ("train" in request.passes and 0 in request.lora_ranks) + sum(map(bool, request.lora_ranks))
        copies += 1 + sum(formats) / 2 + 2 * classes * (KT[0] in request.impls)
    return packed + int(stacked * copies) + activations + _BASE
