"""One layer of the three sides: stock in fp32, stock in its own dtype, compiled.

In: the sides, the layer's number, its inputs. Out: rows, and the hidden states after the layer. The stock layer in fp32
is the yardstick, or where a kernel quantises, the same layer with its experts' weights through the format's reference
(`yardstick.py`). Rows: the whole layer on equal hidden states; each block on the inputs that it had in stock in fp32;
each expert on hidden states that the experts had there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ktc.foundation.progress import Tally
from ktc.inference.prove.calls import LayerCall
from ktc.inference.prove.compiled import CompiledLayers
from ktc.inference.prove.experts import Experts
from ktc.inference.prove.groups import inside
from ktc.inference.prove.probe import Probe, answers, make_probe, unprobed
from ktc.inference.prove.report import Row
from ktc.inference.prove.rows import AskedExperts, Seen, rows_of
from ktc.inference.prove.stock import StockModel
from ktc.inference.prove.tokens import Tokens
from ktc.inference.prove.watch import LayerRun, run_layer
from ktc.inference.prove.yardstick import ExpertsFormat, formats_in, through_format
from ktc.model.checkpoint import WeightSource
from ktc.model.manifest.manifest import Manifest

_PRECISION = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # the coarsest first


@dataclass(frozen=True, slots=True)
class Sides:
    """Both models and the names of their layers; `rows` are those of `weights.json`."""

    stock: StockModel
    compiled: CompiledLayers
    groups: tuple[str, ...]
    dtype: torch.dtype
    manifest: Manifest
    rows: tuple[WeightSource, ...]

    @property
    def stock_layers(self) -> list[nn.Module]:
        """The layers of the stock model."""
        return [self.stock.layer(group) for group in self.groups]

    @property
    def compiled_layers(self) -> list[nn.Module]:
        """The layers of the compiled model."""
        return [self.compiled.layer(group) for group in self.groups]


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The hidden states (1, T, H) of stock in fp32, those carried by stock and compiled, and each side's call."""

    fp32: Tensor
    carried: tuple[Tensor, Tensor] | None
    fp32_call: LayerCall
    own_call: LayerCall
    compiled_call: LayerCall


@dataclass(frozen=True, slots=True)
class LayerFound:
    """The rows, and hidden states after the layer: of stock in fp32, and those that stock and compiled carry on."""

    rows: tuple[Row, ...]
    fp32: Tensor
    carried: tuple[Tensor, Tensor] | None


def compare_layer(sides: Sides, index: int, inputs: LayerInputs, tokens: Tokens, tally: Tally) -> LayerFound:
    """Compare one layer. One side's weights are in memory at a time."""
    group = sides.groups[index]
    formats = formats_in(group, sides.manifest, sides.rows)
    experts, stock = tuple(formats), sides.stock.layer(group)
    coarser = _coarser(sides.dtype, [form.computes for form in formats.values()])
    of_stock, of_compiled = inputs.carried or (None, None)

    sides.stock.load(group)
    start = run_layer(stock, inputs.fp32_call, inputs.fp32, experts)
    refusals = {each.path: unprobed(stock.get_submodule(each.path)) for each in experts}
    probes = {
        each.path: make_probe(each, start.rows[each.path])
        for each in experts
        if each.path in start.rows and not refusals[each.path]
    }
    wanted = _yardstick(stock, inputs, formats, start, probes)
    sides.stock.to_own_dtype(group, coarser)
    call = inputs.own_call if coarser is None else inputs.own_call.to(coarser)
    own = _see(stock, call, inputs.fp32, of_stock, coarser or sides.dtype, experts, start, probes)
    sides.stock.release(group)
    tally.add(sides.stock.bytes_of(group))

    sides.compiled.load(group)
    compiled = sides.compiled.layer(group)
    ktc = _see(compiled, inputs.compiled_call, inputs.fp32, of_compiled, sides.dtype, experts, start, probes)
    sides.compiled.release(group)
    tally.add(sides.compiled.bytes_of(group))

    asked = [
        AskedExperts(
            each.path,
            probes[each.path].expert if each.path in probes else None,
            refusals[each.path] or "no token reached its experts",
            form.words,
        )
        for each, form in formats.items()
    ]
    rewritten = [step.fqn[len(group) + 1 :] for step in sides.manifest.rewrites if inside(step.fqn, group)]
    rows = rows_of(ktc, own, wanted, start, asked, rewritten, tokens)
    after = None if own.carried is None or ktc.carried is None else (own.carried, ktc.carried)
    return LayerFound(rows, start.output, after)


def _yardstick(
    stock: nn.Module, inputs: LayerInputs, formats: Mapping[Experts, ExpertsFormat], start: LayerRun,
    probes: Mapping[str, Probe],
) -> Seen:  # fmt: skip
    """Return the runs in fp32: those of `start`, or again with weights that went through a format."""
    if not any(form.quantises for form in formats.values()):
        return Seen(start, start, _ask(stock, probes, torch.float32))
    for each, form in formats.items():
        through_format(stock.get_submodule(each.path), form)
    return _see(stock, inputs.fp32_call, inputs.fp32, None, torch.float32, tuple(formats), start, probes)


def _coarser(model: torch.dtype, kernels: Sequence[torch.dtype | None]) -> torch.dtype | None:
    """Return the dtype of a kernel that is coarser than the model's: the rule names it, so stock computes in it too."""
    coarsest = min((model, *(each for each in kernels if each is not None)), key=_PRECISION.index)
    return None if coarsest == model else coarsest


def _see(
    layer: nn.Module, call: LayerCall, x: Tensor, carried: Tensor | None, dtype: torch.dtype,
    experts: Sequence[Experts], start: LayerRun, probes: Mapping[str, Probe],
) -> Seen:  # fmt: skip
    return Seen(
        run_layer(layer, call, x.to(dtype), experts),
        run_layer(layer, call, x.to(dtype), experts, start),
        _ask(layer, probes, dtype),
        None if carried is None else run_layer(layer, call, carried.to(dtype), ()).output,
    )


def _ask(layer: nn.Module, probes: Mapping[str, Probe], dtype: torch.dtype) -> dict[str, Tensor]:
    return {path: answers(layer.get_submodule(path), probe, dtype) for path, probe in probes.items()}
