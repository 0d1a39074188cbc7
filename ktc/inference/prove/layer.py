"""One layer of the three sides, and its rows.

In: both models, the layer's number, its calls and inputs. Out: rows, and the hidden states after the layer. The stock
layer in fp32 is the baseline, or where a kernel quantises, the same layer with its experts' weights through the
format's reference (`quantised_baseline`). Rows: the whole layer on equal hidden states; each block on the inputs that
it had in stock in fp32; each expert on hidden states that the experts had there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ktc.foundation.module_paths import is_inside
from ktc.inference.prove.calls import LayerCall
from ktc.inference.prove.compare import Output, compare, compare_experts
from ktc.inference.prove.layer_run import LayerRun, run_layer
from ktc.inference.prove.probe import Probe, answers, make_probe, unprobed
from ktc.inference.prove.report import Row
from ktc.inference.prove.sides import Models, Sides
from ktc.model.compare.errors import root_mean_square, row_errors
from ktc.model.compare.experts import Experts
from ktc.model.compare.feed import Tokens
from ktc.model.compare.quantised_baseline import ExpertsFormat, formats_in, through_format

_PRECISION = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # the coarsest first
Formats = Mapping[Experts, ExpertsFormat]


@dataclass(frozen=True, slots=True)
class LayerRuns:
    """One side's runs: the whole layer, its blocks on given inputs, by path the answers of experts alone.

    `carried` are the hidden states after the layer for those that the side carried.
    """

    whole: LayerRun
    blocks: LayerRun
    experts: Mapping[str, Tensor]
    carried: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """What all sides begin from: the layer's input (1, T, H) and its run in unquantised stock in fp32.

    `probes` ask experts alone, by path; `refusals` say why others are not.
    """

    x: Tensor
    run: LayerRun
    formats: Formats
    probes: Mapping[str, Probe]
    refusals: Mapping[str, str]

    def run_in(self, layer: nn.Module, call: LayerCall, dtype: torch.dtype, carried: Tensor | None = None) -> LayerRuns:
        """Run one side's layer in `dtype`."""
        experts, x = tuple(self.formats), self.x.to(dtype)
        return LayerRuns(
            run_layer(layer, call, x, experts),
            run_layer(layer, call, x, experts, self.run),
            self.expert_answers(layer, dtype),
            None if carried is None else run_layer(layer, call, carried.to(dtype), ()).output,
        )

    def expert_answers(self, layer: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the answers of experts alone, by path."""
        return {path: answers(layer.get_submodule(path), probe, dtype) for path, probe in self.probes.items()}


def compare_layer(
    models: Models, index: int, calls: Sides[LayerCall], streams: Sides[Tensor], carry: bool, tokens: Tokens
) -> tuple[tuple[Row, ...], Sides[Tensor]]:
    """Return the rows of a layer, and the hidden states after it.

    `streams` are those before it: of stock in fp32, and with `carry` those that stock and the compiled model carry.
    """
    opened, group = models.opened, models.stock.groups[index]
    formats = formats_in(group, opened.manifest, opened.rows)
    coarser = _coarser(models.stock.dtype, [form.computes for form in formats.values()])
    own_call, own_dtype = (calls.stock, models.stock.dtype) if coarser is None else (calls.stock.to(coarser), coarser)
    own_stream, compiled_stream = (streams.stock, streams.ktc) if carry else (None, None)
    turn = (model.get_submodule(group) for model in models.in_turn(group, coarser))
    layer = next(turn)
    start = _start(layer, calls.baseline, streams.baseline, formats)
    baseline = _baseline(layer, calls.baseline, start)
    stock = start.run_in(next(turn), own_call, own_dtype, own_stream)
    ktc = start.run_in(next(turn), calls.ktc, models.stock.dtype, compiled_stream)
    next(turn, None)  # releases the compiled layer
    rewritten = [step.fqn[len(group) + 1 :] for step in opened.manifest.rewrites if is_inside(step.fqn, group)]
    rows = tuple(_rows(Sides(baseline, stock, ktc), start, rewritten, tokens))
    if stock.carried is None or ktc.carried is None:
        return rows, streams._replace(baseline=start.run.output)
    return rows, Sides(start.run.output, stock.carried, ktc.carried)


def _start(layer: nn.Module, call: LayerCall, x: Tensor, formats: Formats) -> Start:
    run = run_layer(layer, call, x, tuple(formats))
    refusals = {experts.path: unprobed(layer.get_submodule(experts.path)) for experts in formats}
    unreached = [path for path, why in refusals.items() if not why and path not in run.rows]
    refusals |= dict.fromkeys(unreached, "no token reached its experts")
    probes = {e.path: make_probe(e, run.rows[e.path]) for e in formats if not refusals[e.path]}
    return Start(x, run, formats, probes, refusals)


def _baseline(layer: nn.Module, call: LayerCall, start: Start) -> LayerRuns:
    """Return the runs in fp32: those of `start`, or again with weights that went through a format."""
    if not any(form.quantises for form in start.formats.values()):
        return LayerRuns(start.run, start.run, start.expert_answers(layer, torch.float32))
    for experts, form in start.formats.items():
        through_format(layer.get_submodule(experts.path), form)
    return start.run_in(layer, call, torch.float32)


def _coarser(model: torch.dtype, kernels: Sequence[torch.dtype | None]) -> torch.dtype | None:
    """Return the dtype of a kernel that is coarser than the model's: the rule names it, so stock computes in it too."""
    coarsest = min((model, *(dtype for dtype in kernels if dtype is not None)), key=_PRECISION.index)
    return None if coarsest == model else coarsest


# Rows -----------------------------------------------------------------------------------------------------------------
def _rows(sides: Sides[LayerRuns], start: Start, rewritten: Sequence[str], tokens: Tokens) -> Iterator[Row]:
    """Yield the rows of the layer, its blocks and its experts; `rewritten` has paths in the layer."""
    whole = Sides(*(_output(side.whole, "", tokens) for side in sides))
    row = _with_format(compare("", "layer", True, whole, tokens), whole, start, "", tokens)
    yield replace(row, note="; ".join(filter(None, (row.note, *start.refusals.values()))))
    for name in start.run.blocks:
        if all(name in side.blocks.blocks for side in sides):
            outputs = Sides(*(_output(side.blocks, name, tokens) for side in sides))
            row = compare(name, "block", any(is_inside(path, name) for path in rewritten), outputs, tokens)
            yield _with_format(row, outputs, start, name, tokens)
    for experts, form in start.formats.items():
        if experts.path in start.probes:
            of = Sides(*(side.experts[experts.path] for side in sides))
            yield replace(compare_experts(experts.path, of, start.probes[experts.path].expert), note=form.words)


def _with_format(row: Row, outputs: Sides[Output], start: Start, name: str, tokens: Tokens) -> Row:
    """Return the row with what the weight formats in the block `name` cost, "" for the layer."""
    if not any(form.words and _within(experts.path, name) for experts, form in start.formats.items()):
        return row
    plain = _output(start.run, name, tokens)
    return replace(row, format_error=root_mean_square(row_errors(outputs.baseline.values, plain.values)))


def _output(run: LayerRun, name: str, tokens: Tokens) -> Output:
    """Return the output of the block `name`, "" for the layer, and the choices of the experts in it."""
    output = run.blocks[name].output if name else run.output
    choices = tuple(run.choices[path] for path in sorted(run.choices) if _within(path, name))
    return Output(_per_token(output, tokens), choices)


def _within(path: str, name: str) -> bool:
    return not name or is_inside(path, name)


def _per_token(output: Tensor, tokens: Tokens) -> Tensor:
    """Return an output as (T, anything) in fp32 on the CPU; one row if it does not divide by the tokens."""
    count = tokens.ids.shape[1]
    return output.float().cpu().reshape(count if output.numel() % count == 0 else 1, -1)
