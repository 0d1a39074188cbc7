"""`ktc prove`: each layer of a compiled model beside the stock layer, in memory for about one layer.

In: OUT and its checkpoint, tokens, the layers to compare. Out: a frozen `Report`. Layer by layer, on the hidden states
that the stock model in fp32 had before it: the stock layer in fp32 from the checkpoint; the same layer in the model's
own dtype; the compiled layer with its packed weights and kernels. Errors therefore do not add up, and a red row names
the place of the fault. One side's layer is released before the next one's is read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from torch import Tensor

from ktc.foundation.progress import Progress, Tally
from ktc.inference.prove.calls import Recorded, logits, record
from ktc.inference.prove.compare import Output, compare
from ktc.inference.prove.compiled import CompiledLayers
from ktc.inference.prove.layer import compare_layer
from ktc.inference.prove.layer_run import run_layer
from ktc.inference.prove.layers import chosen_layers
from ktc.inference.prove.report import SCHEMA, Carried, FinalReport, LayerReport, Report, Row, Whole, manifest_digest
from ktc.inference.prove.sides import Models, Sides, bytes_read
from ktc.model.compare.errors import FLOOR, TWICE, root_mean_square, row_errors
from ktc.model.compare.feed import Tokens, choose_tokens
from ktc.model.compare.groups import OUTSIDE
from ktc.model.compare.opened import open_compiled, open_stock
from ktc.model.compare.shown import show
from ktc.model.hf.stock_model import vocabulary_of
from ktc.model.loading.images import read_images
from ktc.model.manifest.manifest import Versions


@dataclass(frozen=True, slots=True)
class Request:
    """What is compared: the compiled model in `path`, the tokens, the layers.

    Args:
        text: A UTF-8 file whose first `count` tokens are used; random tokens of `seed` without one.
        images: Files of images. A question that shows them precedes the tokens.
        layers: Numbers and ranges such as `0,3,10-12`. Others only run as stock in fp32, up to the last one chosen.
            Norm and head are compared if all layers are.
        carry: Also run whole forward passes of both sides, each fed its own results, if all layers are compared.
        weights: The checkpoint, if it has moved since the compilation.
    """

    path: Path
    text: Path | None = None
    images: tuple[Path, ...] = ()
    count: int = 128
    seed: int = 0
    layers: str | None = None
    carry: bool = False
    weights: Path | None = None
    trust_remote_code: bool = False


def prove_model(request: Request, progress: Progress | None = None) -> Report:
    """Compare the compiled model with the stock model on real weights. `progress` gets bytes read and bytes to read.

    Raises:
        InputRefused: what `ktc.load` refuses, N601 to N604, and for images G731 to G733.
        HostLacks: what `ktc.load` needs.
    """
    started = time.perf_counter()
    images = read_images(request.images)
    opened = open_compiled(request.path, request.weights, request.trust_remote_code)
    stock = open_stock(opened)
    chosen = chosen_layers(request.layers, len(stock.groups))
    vocabulary = vocabulary_of(stock.model)
    tokens = choose_tokens(opened.folder, vocabulary, request.text, request.count, request.seed)
    if images:
        trusted = request.trust_remote_code
        tokens = tokens.after(show(opened.folder, request.images, images, stock.model.config, trusted))
    compiled = CompiledLayers(opened, stock.layers)
    models = Models(opened, stock, compiled, Tally(bytes_read(stock, compiled, chosen), progress))
    layers, final = _compared(models, chosen, tokens, request.carry)
    installed = Versions.installed()
    return Report(
        schema=SCHEMA,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={name: str(getattr(installed, name)) for name in ("ktc", "torch", "transformers")},
        manifest=manifest_digest(opened.folder),
        model=opened.manifest.model.name,
        dtype=opened.manifest.model.dtype,
        tokens=tokens.source,
        num_tokens=tokens.ids.shape[1],
        seed=request.seed,
        chosen=request.layers or "all",
        packed="read from the packed store" if opened.store is not None else "packed from the checkpoint",
        stock_read=stock.read_by,
        twice=TWICE,
        floor=FLOOR,
        seconds=round(time.perf_counter() - started, 2),
        layers=layers,
        final=final,
    )


def _compared(
    models: Models, chosen: Sequence[int], tokens: Tokens, carry: bool
) -> tuple[tuple[LayerReport, ...], FinalReport | None]:
    """Return the reports of the layers `chosen`, and of norm and head where those are all."""
    whole = len(chosen) == len(models.stock.groups)
    carry = carry and whole
    turns = models.in_turn(OUTSIDE)
    recorded = Sides(*(record(model, models.layers_of(model), tokens.ids, tokens.shown) for model in turns))
    streams = Sides(*(side.hidden for side in recorded))
    reports: list[LayerReport] = []
    for index in range(chosen[-1] + 1):
        streams = Sides(*(side.before(index, x) for side, x in zip(recorded, streams, strict=True)))
        calls = Sides(*(side.calls[index] for side in recorded))
        group = models.stock.groups[index]
        if index not in chosen:
            for model in models.in_fp32(group):
                layer = model.get_submodule(group)
                streams = streams._replace(baseline=run_layer(layer, calls.baseline, streams.baseline, ()).output)
            continue
        rows, streams = compare_layer(models, index, calls, streams, carry, tokens)
        rows = (*rows, *_inputs(recorded, index, tokens))
        carried = Carried(*_errors(Sides(*(x[0].float().cpu() for x in streams)))) if carry else None
        class_name = type(models.stock.model.get_submodule(group)).__name__
        reports.append(LayerReport(index, group, class_name, rows, carried))
    return tuple(reports), _final(models, recorded, streams, tokens, carry) if whole else None


def _inputs(recorded: Sides[Recorded], index: int, tokens: Tokens) -> Iterator[Row]:
    """Yield the row of what each side's embeddings and towers give to a layer, where images are shown."""
    given = [side.hidden if index == 0 else side.added.get(index) for side in recorded]
    values = [Output(x[0].float().cpu()) for x in given if x is not None]
    if tokens.shown is not None and len(values) == len(given):
        what = "features of images" if index else "embeddings and towers"
        yield compare(what, "input", False, Sides(*values), tokens)


def _errors(outputs: Sides[Tensor]) -> tuple[float | None, float | None]:
    """Return the errors of the compiled model and of stock."""
    wanted, stock, ktc = outputs
    return root_mean_square(row_errors(ktc, wanted)), root_mean_square(row_errors(stock, wanted))


def _final(
    models: Models, recorded: Sides[Recorded], streams: Sides[Tensor], tokens: Tokens, carry: bool
) -> FinalReport:
    """Compare norm and head on the baseline's hidden states, and with `carry` on those that each side carried."""

    def ends() -> Iterator[list[Tensor]]:
        for model, calls, carried in zip(models.in_turn(OUTSIDE), recorded, streams, strict=True):
            inputs = [streams.baseline, carried] if carry and carried is not streams.baseline else [streams.baseline]
            layers = models.layers_of(model)
            yield [logits(model, layers, tokens.ids, x, calls.returned, tokens.shown) for x in inputs]

    sides = Sides(*ends())
    at_head = Sides(*(side[0] for side in sides))
    row = compare("norm and head", "logits", False, Sides(*map(Output, at_head)), tokens)
    of_stock, of_ktc = _same_first(at_head)
    row = replace(row, agreement=of_ktc, stock_agreement=of_stock)
    if not carry:
        return FinalReport(row, None)
    at_end = Sides(*(side[-1] for side in sides))
    of_stock, of_ktc = _same_first(at_end)
    return FinalReport(row, Whole(Carried(*_errors(at_end)), of_ktc, of_stock))


def _same_first(outputs: Sides[Tensor]) -> tuple[float, float]:
    """Return the shares of tokens with the baseline's most probable next token, of stock and of the compiled model."""
    wanted, stock, ktc = (logits.argmax(-1) for logits in outputs)
    return float((stock == wanted).double().mean()), float((ktc == wanted).double().mean())
