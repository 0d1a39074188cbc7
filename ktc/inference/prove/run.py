"""`ktc prove`: each layer of a compiled model beside the stock layer, in memory for about one layer.

In: OUT and its checkpoint, tokens, the layers to compare. Out: a frozen `Report`. Layer by layer, on the hidden states
that the stock model in fp32 had before it: the stock layer in fp32 from the checkpoint; the same layer in the model's
own dtype; the compiled layer with its packed weights and kernels. Errors therefore do not add up, and a red row names
the place of the fault. One side's layer is released before the next one's is read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from torch import Tensor

from ktc.foundation.progress import Progress, Tally
from ktc.inference.prove.calls import Recorded, logits, record
from ktc.inference.prove.compare import Output, Outputs, compare, root_mean_square, token_errors
from ktc.inference.prove.compiled import CompiledLayers, Opened, open_compiled
from ktc.inference.prove.groups import OUTSIDE
from ktc.inference.prove.layer import LayerInputs, Sides, compare_layer
from ktc.inference.prove.layers import chosen_layers
from ktc.inference.prove.opened_stock import open_stock
from ktc.inference.prove.report import (
    FLOOR,
    SCHEMA,
    TWICE,
    Carried,
    FinalReport,
    LayerReport,
    Report,
    Whole,
    manifest_digest,
)
from ktc.inference.prove.tokens import COUNT, Tokens, choose_tokens
from ktc.inference.prove.watch import run_layer
from ktc.model.manifest.manifest import Versions


@dataclass(frozen=True, slots=True)
class _Calls:
    """How each side's model calls its layers: stock in fp32, stock in its own dtype, compiled."""

    fp32: Recorded
    own: Recorded
    compiled: Recorded


@dataclass(frozen=True, slots=True)
class _Streams:
    """Hidden states (1, T, H) before a layer: those of stock in fp32, and those that the other two sides carried."""

    fp32: Tensor
    own: Tensor
    compiled: Tensor


def prove_model(
    path: str | Path,
    *,
    text: Path | None = None,
    count: int = COUNT,
    seed: int = 0,
    layers: str | None = None,
    carry: bool = False,
    weights: Path | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Compare the compiled model in `path` with the stock model on real weights, and return the report.

    Args:
        text: A UTF-8 file whose first `count` tokens are used; random tokens of `seed` without one.
        layers: Numbers and ranges such as `0,3,10-12`. Others only run as stock in fp32, up to the last one chosen.
            Norm and head are compared if all layers are.
        carry: Also run whole forward passes of both sides, each fed its own results, if all layers are compared.
        weights: The checkpoint, if it has moved since the compilation.
        progress: Called with the bytes read and the bytes to read.

    Raises:
        InputRefused: what `ktc.load` refuses, and N601 to N604.
        HostLacks: what `ktc.load` needs.
    """
    started = time.perf_counter()
    opened = open_compiled(Path(path), weights, trust_remote_code)
    sides, chosen, tokens = _sides(opened, layers, text, count, seed)
    whole = len(chosen) == len(sides.groups)
    carry = carry and whole
    tally = Tally(_bytes(sides, chosen, whole), progress)
    calls = _record(sides, tokens, tally)
    streams = _Streams(calls.fp32.hidden, calls.own.hidden, calls.compiled.hidden)
    reports: list[LayerReport] = []
    for index in range(chosen[-1] + 1):
        if index not in chosen:
            streams = replace(streams, fp32=_run_stock(sides, calls, index, streams.fp32, tally))
            continue
        call = tuple(each.calls[index] for each in (calls.fp32, calls.own, calls.compiled))
        inputs = LayerInputs(streams.fp32, (streams.own, streams.compiled) if carry else None, *call)
        found = compare_layer(sides, index, inputs, tokens, tally)
        streams = _Streams(found.fp32, *(found.carried or (streams.own, streams.compiled)))
        carried = _carried(streams) if carry else None
        group = sides.groups[index]
        class_name = type(sides.stock.layer(group)).__name__
        reports.append(LayerReport(index, group, class_name, found.rows, carried))
    final = _final(sides, calls, streams, tokens, carry, tally) if whole else None
    return Report(
        SCHEMA,
        datetime.now(UTC).isoformat(timespec="seconds"),
        {name: str(value) for name, value in _versions().items()},
        manifest_digest(opened.folder),
        opened.manifest.model.name,
        opened.manifest.model.dtype,
        tokens.source,
        tokens.ids.shape[1],
        seed,
        layers or "all",
        "read from the packed store" if opened.store is not None else "packed from the checkpoint",
        sides.stock.read_by,
        TWICE,
        FLOOR,
        round(time.perf_counter() - started, 2),
        tuple(reports),
        final,
    )


def _versions() -> dict[str, str]:
    installed = Versions.installed()
    return {name: getattr(installed, name) for name in ("ktc", "torch", "transformers")}


def _sides(
    opened: Opened, layers: str | None, text: Path | None, count: int, seed: int
) -> tuple[Sides, tuple[int, ...], Tokens]:
    """Build both models on meta, and choose layers and tokens. No weight is read."""
    stock = open_stock(opened)
    chosen = chosen_layers(layers, len(stock.groups))
    tokens = choose_tokens(opened.folder, stock.vocabulary, text, count, seed)
    compiled = CompiledLayers(opened, stock.layers)
    compiled.model.config.update({"output_router_logits": False} if stock.collects_router_logits else {})
    return Sides(stock.model, compiled, stock.groups, stock.dtype, opened.manifest, opened.rows), chosen, tokens


def _bytes(sides: Sides, chosen: Sequence[int], whole: bool) -> int:
    """Return the bytes that a run reads."""
    times = 2 if whole else 1
    outside = sides.stock.bytes_of(OUTSIDE) + sides.compiled.bytes_of(OUTSIDE)
    stock = sum(sides.stock.bytes_of(group) for group in sides.groups[: chosen[-1] + 1])
    return times * outside + stock + sum(sides.compiled.bytes_of(sides.groups[index]) for index in chosen)


def _record(sides: Sides, tokens: Tokens, tally: Tally) -> _Calls:
    """Record the calls of all layers on each side."""
    stock, compiled = sides.stock, sides.compiled
    stock.load(OUTSIDE)
    fp32 = record(stock.model, sides.stock_layers, tokens.ids)
    stock.to_own_dtype(OUTSIDE)
    own = record(stock.model, sides.stock_layers, tokens.ids)
    stock.release(OUTSIDE)
    tally.add(stock.bytes_of(OUTSIDE))
    compiled.load(OUTSIDE)
    found = _Calls(fp32, own, record(compiled.model, sides.compiled_layers, tokens.ids))
    compiled.release(OUTSIDE)
    tally.add(compiled.bytes_of(OUTSIDE))
    return found


def _run_stock(sides: Sides, calls: _Calls, index: int, x: Tensor, tally: Tally) -> Tensor:
    """Return the hidden states after a layer that is not compared."""
    group = sides.groups[index]
    sides.stock.load(group)
    out = run_layer(sides.stock.layer(group), calls.fp32.calls[index], x, ()).output
    sides.stock.release(group)
    tally.add(sides.stock.bytes_of(group))
    return out


def _carried(streams: _Streams) -> Carried:
    wanted = streams.fp32[0].float()
    ktc, own = (token_errors(side[0].float().cpu(), wanted) for side in (streams.compiled, streams.own))
    return Carried(root_mean_square(ktc), root_mean_square(own))


def _final(sides: Sides, calls: _Calls, streams: _Streams, tokens: Tokens, carry: bool, tally: Tally) -> FinalReport:
    """Compare norm and head on the yardstick's hidden states, and with `carry` on those that each side carried."""
    stock, compiled, ids = sides.stock, sides.compiled, tokens.ids
    stock.load(OUTSIDE)
    wanted = logits(stock.model, sides.stock_layers, ids, streams.fp32, calls.fp32.returned)
    stock.to_own_dtype(OUTSIDE)
    of_stock, *stock_end = (
        logits(stock.model, sides.stock_layers, ids, x, calls.own.returned)
        for x in (streams.fp32, *([streams.own] if carry else ()))
    )
    stock.release(OUTSIDE)
    tally.add(stock.bytes_of(OUTSIDE))
    compiled.load(OUTSIDE)
    of_ktc, *ktc_end = (
        logits(compiled.model, sides.compiled_layers, ids, x, calls.compiled.returned)
        for x in (streams.fp32, *([streams.compiled] if carry else ()))
    )
    compiled.release(OUTSIDE)
    tally.add(compiled.bytes_of(OUTSIDE))
    row = compare("norm and head", "logits", False, Outputs(Output(of_ktc), Output(of_stock), Output(wanted)), tokens)
    row = replace(row, agreement=_same_first(of_ktc, wanted), stock_agreement=_same_first(of_stock, wanted))
    if not carry:
        return FinalReport(row, None)
    errors = Carried(*(root_mean_square(token_errors(each[0], wanted)) for each in (ktc_end, stock_end)))
    return FinalReport(row, Whole(errors, _same_first(ktc_end[0], wanted), _same_first(stock_end[0], wanted)))


def _same_first(found: Tensor, wanted: Tensor) -> float:
    return float((found.argmax(-1) == wanted.argmax(-1)).double().mean())
