"""`ktc bench decode`: decoding and prefill of a compiled model beside stock Hugging Face and llama.cpp.

In: a request. Out: a report of medians of rounds, in which all engines compute a case in turns. Refused: a missing peer
(H245, U014), and what compiling and loading refuse.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from ktc import compiler
from ktc.foundation import host
from ktc.foundation.files import temporary_folder
from ktc.foundation.host import Host
from ktc.model.loading.load import load
from ktc.tools.bench.decode.engines import Engine, LocalEngine, prompt_of
from ktc.tools.bench.decode.model_file import FILE, config_of, floor_bytes, tensors_of, write_model
from ktc.tools.bench.decode.parts import parts_of
from ktc.tools.bench.machine import processor
from ktc.tools.bench.peers import peer
from ktc.tools.bench.progress import ProgressSink
from ktc.tools.bench.report import Report, column, table_of, threads_and_clock
from ktc.tools.bench.requests import Case, Decode
from ktc.tools.bench.rounds import Seconds, Turns, clock_of, in_turns, milliseconds
from ktc.tools.bench.sizes import SIZES
from ktc.tools.measure.figures import threads_of_torch
from ktc.tools.measure.limits import Limits, Samples, build_library

if TYPE_CHECKING:
    from rich.table import Table

_PROMPTS: Final = (5, 17, 40, 64)  # tokens of the prompts whose logits are compared
_LIKELIEST: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One engine in one case. `ms` is the median of the rounds, of a decode step or of a whole prompt.

    It is CPU time with one thread, wall time with more. `floor_ms` is the time that reading the active weights and the
    cache takes at the bandwidth of the same rounds, None for a prefill, and `share_of_floor` what that is of `ms`: 1
    would be the speed of memory. `tokens_per_second` are those of all sequences. `ktc_speedup` is the speed of ktc
    relative to this row, the median of the ratios of each round; None for ktc's own rows.
    """

    case: Case = column("case", left=True)
    impl: str = column("implementation", left=True)
    ms: float = column("ms", "{:,.1f}")
    tokens_per_second: float = column("token/s", "{:,.1f}")
    floor_ms: float | None = column("floor ms", "{:,.1f}")
    share_of_floor: float | None = column("of floor", "{:.2f}")
    wall_ms: float = column("wall ms", "{:,.1f}")
    ktc_speedup: float | None = column("ktc is", "{:.2f}x as fast", default=None)
    best_ms: float
    cpu_ms: float
    rounds: int
    read_gbps: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """How an engine's logits after some prompts compare with ktc's.

    `error` is the median relative Frobenius error, `same_next` in how many of the prompts the most probable token is
    the same, `common` the mean share of ktc's ten most probable tokens among its ten.
    """

    impl: str
    prompts: int
    error: float
    same_next: int
    common: float

    def __str__(self) -> str:
        return (
            f"logits of {self.impl} after {self.prompts} prompts: {self.error:.1e} from ktc's, the same next token in "
            f"{self.same_next}, {100 * self.common:.0f} % of the ten most probable in common"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeReport(Report):
    """`parts` has the milliseconds of a step of ktc by case and part, empty without `--profile`."""

    host: Mapping[str, Any]
    model: str
    file_format: str
    layers: int
    read_gbps: float
    rows: tuple[Row, ...]
    agreement: tuple[Agreement, ...]
    parts: Mapping[str, Mapping[str, float]]

    @property
    def speedup(self) -> dict[str, float]:
        """The geometric mean of ktc's speed relative to each other engine, over all cases."""
        ratios = dict[str, list[float]]()
        for row in self.rows:
            if row.ktc_speedup is not None:
                ratios.setdefault(row.impl, []).append(row.ktc_speedup)
        return {impl: statistics.geometric_mean(values) for impl, values in ratios.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the object of `--json`; the case of a row is spread."""
        report = asdict(self)
        rows = [{**row.pop("case"), **row} for row in report["rows"]]
        return {**report, "format": report.pop("file_format"), "rows": rows, "speedup": self.speedup}

    def shown(self) -> Iterator[str | Table]:
        """Yield the machine, the rows, a step by part, the agreement of logits, and the means."""
        where = f"{self.model}, {self.layers} layers, {self.file_format}, on {self.host['cpu']}, {self.host['isa']}"
        yield f"{where}: {threads_and_clock(self.host)}; read {self.read_gbps:.1f} GB/s"
        yield table_of(self.rows, lambda row: row.case)
        if self.parts:
            yield self._parts()
        yield from map(str, self.agreement)
        for impl, mean in self.speedup.items():
            yield f"geometric mean over all cases: ktc is {mean:.2f}x as fast as {impl}"

    def _parts(self) -> Table:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
        table.add_column("a step of ktc, without native steps, ms")
        for name in (*next(iter(self.parts.values())), "sum"):
            table.add_column(name, justify="right")
        for case, spent in self.parts.items():
            table.add_row(case, *(f"{value:.1f}" for value in (*spent.values(), sum(spent.values()))))
        return table


def run(request: Decode, sink: ProgressSink) -> DecodeReport:
    """Measure every case with every engine."""
    with ExitStack() as stack, threads_of_torch(request.threads):
        work = stack.enter_context(temporary_folder("decode"))
        sink.progress("writing the model", 0, 0)
        folder = write_model(request.model, request.layers, request.file_format, request.folder or work / "model")
        config: Any = config_of(SIZES[request.model], request.layers)
        tensors = tensors_of(config, SIZES[request.model].architecture, request.file_format)
        engines = {engine.impl: engine for engine in _engines(request, folder, work, stack, sink)}
        limits = Limits(build_library(host_of(request).isas[0], work), request.threads)
        sink.progress("comparing logits", 0, 0)
        agreement = tuple(_agreements(engines, config.vocab_size))
        total, rows, parts = Samples(), list[Row](), dict[str, dict[str, float]]()
        for place, case in enumerate(request.cases):
            turns = _measure(case, engines, request.rounds, limits, sink.at(place, len(request.cases)))
            total.extend(turns.samples)
            floor = floor_bytes(tensors, config, case) if case.kind == "decode" else None
            rows += _rows(request, case, turns, floor)
            ktc = engines.get("ktc")
            if request.profile and case.kind == "decode" and isinstance(ktc, LocalEngine):
                parts[str(case)] = {part: 1e3 * value for part, value in parts_of(ktc, case).items()}
    return DecodeReport(
        host={
            **processor(host_of(request).isas[0], request.threads),
            **{impl: engine.about for impl, engine in engines.items() if engine.about},
        },
        model=request.model,
        file_format=request.file_format,
        layers=config.num_hidden_layers,
        read_gbps=total.median()[1],
        rows=tuple(rows),
        agreement=agreement,
        parts=parts,
    )


def host_of(request: Decode) -> Host:
    """Return this machine with the threads and the instruction set of the request."""
    here = host.detect()
    here = host.restrict(here, request.isa) if request.isa else here
    return replace(here, cores=min(here.cores, request.threads), threads=min(here.threads, request.threads))


def _engines(request: Decode, folder: Path, work: Path, stack: ExitStack, sink: ProgressSink) -> Iterator[Engine]:
    if "llama.cpp" in request.peers:  # first: where it is missing, nothing is compiled
        sink.progress("llama.cpp loads the model", 0, 0)
        yield peer("llama").LlamaEngine(request.peer_python, folder / FILE, request.threads, stack)
    stock = peer("stock") if "hf" in request.impls else None
    if "ktc" in request.impls:
        sink.progress("ktc compiles and loads the model", 0, 0)
        out = work / "out"
        compiler.compile(folder, request.rule, out, settings=request.settings, host=host_of(request))
        yield LocalEngine("ktc", load(out))
    if stock is not None:
        sink.progress("Hugging Face loads the model", 0, 0)
        yield LocalEngine("hf", stock.of_checkpoint(folder, config_of(SIZES[request.model], request.layers)))


def _measure(
    case: Case, engines: Mapping[str, Engine], rounds: int, limits: Limits, observe: Callable[[str], None]
) -> Turns[str]:
    for impl, engine in engines.items():
        observe(f"{case}: {impl} prepares")
        engine.prepare(case)

    def turn_of(engine: Engine) -> Callable[[int], Seconds]:
        return lambda number: engine.run(case)

    runs = {impl: turn_of(engine) for impl, engine in engines.items()}
    return in_turns(runs, rounds, limits, lambda impl: observe(f"{case}: {impl}"))


def _agreements(engines: Mapping[str, Engine], vocabulary: int) -> Iterator[Agreement]:
    """Yield how the other engines agree with ktc; nothing without ktc."""
    prompts = [prompt_of(length, vocabulary, seed=length) for length in _PROMPTS]
    logits = {impl: [engine.logits(prompt) for prompt in prompts] for impl, engine in engines.items()}
    for impl, theirs in logits.items():
        if impl != "ktc" and "ktc" in logits:
            yield agreement_of(impl, logits["ktc"], theirs)


def agreement_of(impl: str, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Agreement:
    """Compare logits (vocabulary,) after the same prompts."""
    pairs = list(zip(ours, theirs, strict=True))
    errors = [float((a - b).square().sum().sqrt() / b.square().sum().sqrt()) for a, b in pairs]
    best = [(_likeliest(a), _likeliest(b)) for a, b in pairs]
    same = sum(int(a.argmax()) == int(b.argmax()) for a, b in pairs)
    common = statistics.mean(len(a & b) / _LIKELIEST for a, b in best)
    return Agreement(impl, len(pairs), statistics.median(errors), same, common)


def _likeliest(logits: Tensor) -> set[int]:
    return {int(token) for token in logits.topk(_LIKELIEST).indices}


def _rows(request: Decode, case: Case, turns: Turns[str], floor: float | None) -> Iterator[Row]:
    """Yield a row per engine; `floor` are the bytes that a step reads."""
    clock, bandwidth = clock_of(request.threads), turns.samples.median()[1]
    floor_ms = None if floor is None else 1e-6 * floor / bandwidth
    ktc_seconds = [getattr(spent, clock) for spent in turns.seconds.get("ktc", ())]
    for impl, seconds in turns.seconds.items():
        ratios = [getattr(spent, clock) / ours for spent, ours in zip(seconds, ktc_seconds, strict=False)]
        times = milliseconds(seconds, request.threads)
        yield Row(
            impl=impl,
            case=case,
            **times,
            **figures(case, times["ms"], floor_ms),
            rounds=len(seconds),
            read_gbps=bandwidth,
            ktc_speedup=statistics.median(ratios) if ratios and impl != "ktc" else None,
        )


def figures(case: Case, ms: float, floor_ms: float | None) -> dict[str, Any]:
    """Return the fields of a row that follow from its time and its floor."""
    tokens = case.batch if case.kind == "decode" else case.tokens
    share = None if floor_ms is None else floor_ms / ms
    return {"tokens_per_second": tokens / ms * 1e3, "floor_ms": floor_ms, "share_of_floor": share}
