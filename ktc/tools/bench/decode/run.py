"""`run`: from a request to a report. All engines compute a case in alternating rounds, and the bandwidth is measured
between them.

Raises what the engines' modules raise. Nothing is compared across runs.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ktc.foundation import host
from ktc.foundation.files import temporary_folder
from ktc.tools.bench.candidate import Seconds
from ktc.tools.bench.decode.engines import Engine, LlamaEngine, LocalEngine, prompt_of
from ktc.tools.bench.decode.floor import floor_bytes
from ktc.tools.bench.decode.model_file import FILE, FileTensor, config_of, tensors_of, write_model
from ktc.tools.bench.decode.models import compiled_model, host_of, stock_model
from ktc.tools.bench.decode.parts import parts_of
from ktc.tools.bench.decode.report import Agreement, Report, Row
from ktc.tools.bench.decode.request import Case, Request
from ktc.tools.bench.decode.sizes import SIZES
from ktc.tools.bench.limits import Limits, Samples, build_library

Progress = Callable[[int, int, str], None]
"""Rounds that are done, rounds in all, and what is done now."""

_PROMPTS: Final = (5, 17, 40, 64)  # tokens of the prompts whose logits are compared
_LIKELIEST: Final = 10


def run(request: Request, progress: Progress) -> Report:
    """Measure every case with every engine. Raises HostLacks (H245) and what compiling and loading raise."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.threads)
    try:
        with ExitStack() as stack:
            return _run(request, progress, stack)
    finally:
        torch.set_num_threads(before)


def _run(request: Request, progress: Progress, stack: ExitStack) -> Report:
    work = stack.enter_context(temporary_folder("decode"))
    progress(0, 0, "writing the model")
    folder = write_model(request.model, request.layers, request.file_format, request.folder or work / "model")
    sizes = SIZES[request.model]
    config = config_of(sizes, request.layers)
    tensors = tensors_of(config, sizes.architecture, request.file_format)
    engines = list(_engines(request, folder, config, work, stack, progress))
    limits = Limits(build_library(host_of(request).isas[0], work), request.threads)
    progress(0, 0, "comparing logits")
    agreement = tuple(_agreements(engines, config.vocab_size))
    total, rows, parts = Samples(), list[Row](), dict[str, dict[str, float]]()
    num_rounds, done = (request.rounds + 1) * len(request.cases), 0
    for case in request.cases:
        samples = Samples()
        seconds: dict[str, list[Seconds]] = {engine.impl: [] for engine in engines}
        for engine in engines:
            progress(done, num_rounds, f"{case}: {engine.impl} prepares")
            engine.prepare(case)
        for round_number in range(request.rounds + 1):  # the first one touches memory and is not counted
            limits.measure(samples)
            for engine in engines:
                progress(done, num_rounds, f"{case}: {engine.impl}")
                spent = engine.run(case)
                if round_number > 0:
                    seconds[engine.impl].append(spent)
            done += 1
        total.extend(samples)
        rows += _rows(request, case, seconds, samples, tensors, config)
        for engine in engines:
            if request.profile and case.kind == "decode" and isinstance(engine, LocalEngine) and engine.impl == "ktc":
                progress(done, num_rounds, f"{case}: parts")
                parts[str(case)] = {part: 1e3 * value for part, value in parts_of(engine, case).items()}
    return Report(
        host=_host(request, engines),
        model=request.model,
        file_format=request.file_format,
        layers=config.num_hidden_layers,
        read_gbps=total.median()[1],
        rows=tuple(rows),
        agreement=agreement,
        parts=parts,
    )


def _engines(
    request: Request, folder: Path, config: Any, work: Path, stack: ExitStack, progress: Progress
) -> Iterator[Engine]:
    if "llama.cpp" in request.impls:  # first: where it is missing, nothing is compiled
        progress(0, 0, "llama.cpp loads the model")
        yield LlamaEngine(request.peer_python, folder / FILE, request.threads, stack)
    if "ktc" in request.impls:
        progress(0, 0, "ktc compiles and loads the model")
        yield LocalEngine("ktc", compiled_model(request, folder, work / "out"))
    if "hf" in request.impls:
        progress(0, 0, "Hugging Face loads the model")
        yield LocalEngine("hf", stock_model(folder, config))


def _agreements(engines: Sequence[Engine], vocabulary: int) -> Iterator[Agreement]:
    """Yield how the other engines agree with ktc; nothing without ktc."""
    prompts = [prompt_of(length, vocabulary, seed=length) for length in _PROMPTS]
    logits = {engine.impl: [engine.logits(prompt) for prompt in prompts] for engine in engines}
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


def _rows(
    request: Request,
    case: Case,
    seconds: dict[str, list[Seconds]],
    samples: Samples,
    tensors: Sequence[FileTensor],
    config: Any,
) -> Iterator[Row]:
    clock = "cpu" if request.threads == 1 else "wall"
    bandwidth = samples.median()[1]
    floor = 1e-6 * floor_bytes(tensors, config, case) / bandwidth if case.kind == "decode" else None
    ours = [getattr(each, clock) for each in seconds.get("ktc", [])]
    for impl, found in seconds.items():
        times = [getattr(each, clock) for each in found]
        ratios = [theirs / own for theirs, own in zip(times, ours, strict=False)]
        yield Row(
            impl=impl,
            case=case,
            ms=1e3 * statistics.median(times),
            best_ms=1e3 * min(times),
            cpu_ms=1e3 * statistics.median(each.cpu for each in found),
            wall_ms=1e3 * statistics.median(each.wall for each in found),
            rounds=len(found),
            read_gbps=bandwidth,
            floor_ms=floor,
            ktc_speedup=statistics.median(ratios) if ratios and impl != "ktc" else None,
        )


def _host(request: Request, engines: Sequence[Engine]) -> dict[str, Any]:
    here = host_of(request)
    return {
        "cpu": host.cpu_name(),
        "isa": here.isas[0],
        "threads": request.threads,
        "clock": "cpu" if request.threads == 1 else "wall",
        **{name: version(name) for name in ("torch", "transformers")},
        "python": platform.python_version(),
        **{engine.impl: engine.about for engine in engines if engine.about},
    }
