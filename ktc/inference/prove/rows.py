"""The rows of one layer, from the runs of its three sides.

In: what was seen of the compiled layer, of stock in its own dtype and of the yardstick. Out: a row for the layer, one
for each block, one for experts that were asked alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ktc.inference.prove.compare import Output, Outputs, compare, compare_experts, root_mean_square, token_errors
from ktc.inference.prove.groups import inside
from ktc.inference.prove.report import Row
from ktc.inference.prove.tokens import Tokens
from ktc.inference.prove.watch import LayerRun


@dataclass(frozen=True, slots=True)
class Seen:
    """One side's runs: the whole layer, its blocks on given inputs, by path the answers of experts asked alone.

    `carried` are the hidden states after the layer for those that the side carried.
    """

    whole: LayerRun
    blocks: LayerRun
    experts: Mapping[str, Tensor]
    carried: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AskedExperts:
    """Experts of the layer: the numbers (N,) of those asked, or why they could not be; their format if it rounds."""

    path: str
    asked: Tensor | None
    why_not: str
    format: str


def rows_of(
    ktc: Seen, own: Seen, wanted: Seen, start: LayerRun, experts: Sequence[AskedExperts], rewritten: Sequence[str],
    tokens: Tokens,
) -> tuple[Row, ...]:  # fmt: skip
    """Return the rows. `start` is the run of unquantised stock in fp32, `rewritten` has paths in the layer."""
    formats = ", ".join(dict.fromkeys(each.format for each in experts if each.format))
    rows = [_layer_row(ktc, own, wanted, start, [each.path for each in experts], bool(formats), tokens)]
    for name, block in start.blocks.items():
        if all(name in each.blocks.blocks for each in (ktc, own, wanted)):
            outputs = Outputs(
                _block(ktc.blocks, name, experts, tokens),
                _block(own.blocks, name, experts, tokens),
                _block(wanted.blocks, name, experts, tokens),
            )
            row = compare(name, "block", any(inside(path, name) for path in rewritten), outputs, tokens)
            if any(each.format and inside(each.path, name) for each in experts):
                row = replace(row, format_error=_cost(outputs.wanted.values, per_token(block.output, tokens)))
            rows.append(row)
    for each in experts:
        if each.asked is not None:
            row = compare_experts(
                each.path, ktc.experts[each.path], own.experts[each.path], wanted.experts[each.path], each.asked
            )
            rows.append(replace(row, note=each.format))
        else:
            rows[0] = replace(rows[0], note="; ".join(filter(None, (rows[0].note, each.why_not))))
    return tuple(rows)


def _layer_row(
    ktc: Seen, own: Seen, wanted: Seen, start: LayerRun, paths: Sequence[str], quantised: bool, tokens: Tokens
) -> Row:
    def output(side: Seen) -> Output:
        return Output(per_token(side.whole.output, tokens), _choices(side.whole, paths))

    found = output(wanted)
    row = compare("", "layer", True, Outputs(output(ktc), output(own), found), tokens)
    return replace(row, format_error=_cost(found.values, per_token(start.output, tokens))) if quantised else row


def _block(run: LayerRun, name: str, experts: Sequence[AskedExperts], tokens: Tokens) -> Output:
    paths = [each.path for each in experts if inside(each.path, name)]
    return Output(per_token(run.blocks[name].output, tokens), _choices(run, paths))


def _choices(run: LayerRun, paths: Sequence[str]) -> tuple[Tensor, ...]:
    return tuple(run.choices[path] for path in paths if path in run.choices)


def _cost(quantised: Tensor, plain: Tensor) -> float | None:
    return root_mean_square(token_errors(quantised, plain))


def per_token(output: Tensor, tokens: Tokens) -> Tensor:
    """Return an output as (T, anything) in fp32 on the CPU; one row if it does not divide by the tokens."""
    count = tokens.ids.shape[1]
    return output.float().cpu().reshape(count if output.numel() % count == 0 else 1, -1)
