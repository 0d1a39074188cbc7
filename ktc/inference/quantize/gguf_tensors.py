"""The tensors of a model's GGUF file: which rows of which stored weights each is made of, and in which order.

In: the original's index of weights, the stock model on meta, and the type of the file's matrices. Out: a `FileTensor`
for each but those of towers, in the order of the model. Vectors, norms, biases and routers are fp32, as llama.cpp
expects them. `llama` orders the rows of q and k by pairs. `deepseek2` splits `kv_b_proj` into keys, transposed for the
latent cache, and values. INT4 weights in groups of whole blocks stay codes, as Q4_0.
Refused (Q510): weights without a name in the architecture's files, weights that the checkpoint lacks, and weights in a
form that only the model's code converts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from torch import Tensor

from ktc.adapters.base_model import BaseModel, Target
from ktc.adapters.gguf import heads_by_pairs
from ktc.diagnostics import Diagnostic, InputRefused, listing
from ktc.inference.quantize.gguf_text import names_of_text
from ktc.inference.quantize.original import Original
from ktc.model.checkpoint.gguf_architectures import gguf_name_of
from ktc.model.checkpoint.gguf_types import block_of
from ktc.model.checkpoint.header import TensorEntry
from ktc.model.hf.conversions import Place, placer
from ktc.model.hf.missing import why_missing

Q4_0: Final = "q4_0"
_EXACT: Final = "f32"
_WIDE: Final = {"q8_0": "f16"}  # of rows that are no whole blocks


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one stored weight: of all of it, or of the matrix `expert` of a stack, `transposed` if it is (in, out).

    `rows` are (first, step, count) of the outputs, `None` for all. `heads`: the rows of each head's halves alternate.
    `latent` is (heads, first, count) of `kv_b_proj`: rows of each head, which are transposed where `turned`.
    """

    entry: TensorEntry
    expert: int | None = None
    transposed: bool = False
    rows: tuple[int, int, int] | None = None
    heads: int = 0
    latent: tuple[int, int, int] | None = None
    turned: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the rows are those of the stored weight, in its order."""
        return self == Piece(self.entry)


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of the file: name, shape with rows last but one, the type as ktc calls it, and its pieces in order."""

    name: str
    shape: tuple[int, ...]
    type: str
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of its data, without padding."""
        block = block_of(self.type)
        return math.prod(self.shape) // block.weights * block.bytes


@dataclass(frozen=True, slots=True)
class FilePlan:
    """The tensors of a file, and the names of stored weights that the model has no place for."""

    tensors: tuple[FileTensor, ...]
    left_out: tuple[str, ...]


def plan_file(original: Original, architecture: str, matrices: str) -> FilePlan:
    """Decide what the file of `architecture` has; `matrices` is its matrices' type. Raises InputRefused (Q510)."""
    base = original.base
    names, targets = names_of_text(base), cast("dict[str, Tensor]", base.model.state_dict())
    pairs = cast("Mapping[str, str]", getattr(base.model, "all_tied_weights_keys", None) or {})
    places, problems, left_out = _places(original, targets, pairs)
    why = why_missing(base.config, original.index, left_out)
    name_of = gguf_name_of(architecture, base.config.get_text_config().num_hidden_layers)
    tensors: list[FileTensor] = []
    for name, tensor in ((name, targets[name]) for name in targets if name in names):
        stored = places.get(name, {})
        if not stored:
            if name not in pairs:
                problems.append(_problem(f"the checkpoint has no tensor of `{name}`", why))
            continue
        try:
            tensors += _tensors(base, name, tuple(tensor.shape), stored, architecture, name_of, original.weights.coded)
        except _Refused as error:
            problems.append(_problem(str(error), "merge or convert it with the tools of its own format"))
    if problems:
        raise InputRefused(*problems[:10])
    typed = (replace(untyped, type=_type(untyped, original, matrices)) for untyped in tensors)
    return FilePlan(tuple(typed), tuple(left_out))


class _Refused(Exception):
    """A weight that has no place in the file; carries the message."""


_Stored = Mapping[tuple[int | None, str], TensorEntry]  # of one parameter, by expert and part


def _places(
    original: Original, targets: Mapping[str, Tensor], pairs: Mapping[str, str]
) -> tuple[dict[str, dict[tuple[int | None, str], TensorEntry]], list[Diagnostic], list[str]]:
    """Return the stored weights of each parameter, what has no place for a reason, and what the model has not."""
    find = placer(original.base.model, dict(targets))
    places: dict[str, dict[tuple[int | None, str], TensorEntry]] = {}
    problems: list[Diagnostic] = []
    left_out: list[str] = []
    for entry in original.index.tensors.values():
        spot = find(entry.name, entry.shape)
        if not isinstance(spot, Place) or spot.target not in targets:
            left_out.append(entry.name)
        elif spot.steps or spot.joined:
            problems.append(_problem(f"`{entry.name}` is stored in another form than the model holds it", ""))
        else:
            part = spot.part if spot.expert is not None and spot.part in ("gate", "up") else ""
            places.setdefault(spot.target, {})[spot.expert, part] = entry
    for copy, kept in pairs.items():
        stored = places.pop(copy, None)
        if stored is not None:
            places.setdefault(kept, stored)
    return places, problems, left_out


def _problem(message: str, hint: str) -> Diagnostic:
    return Diagnostic("Q510", message, hint=hint)


def _tensors(
    base: BaseModel, name: str, shape: tuple[int, ...], stored: _Stored, architecture: str,
    name_of: Callable[[str], str | None], coded: Container[str],
) -> Iterator[FileTensor]:  # fmt: skip
    target = base.targets.get(name)
    if target is not None and target.experts:
        yield from _stacks(target, stored, coded)
        return
    entry = stored.get((None, ""))
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if entry is None or entry.shape != shape:
        raise _Refused(f"`{name}` is stored as {listing(sorted(part.name for part in stored.values()), 2)}")
    stack = base.targets.get(name.removesuffix("_bias"))
    if stack is not None and stack.experts and name.endswith("_bias"):
        yield from _biases(stack, entry)
        return
    if architecture == "deepseek2" and leaf == "kv_b_proj":
        yield from _latent(base, name, entry)
        return
    called = name_of(name)
    if called is None:
        raise _Refused(f"`{name}` has no name in GGUF files of `{architecture}`")
    heads = heads_by_pairs(leaf, base, architecture)
    yield FileTensor(called, shape, "", (Piece(entry, heads=heads),))


def _stacks(target: Target, stored: _Stored, coded: Container[str]) -> Iterator[FileTensor]:
    """Yield the stacks of gate and up, or of one matrix per expert, from matrices or from one stack.

    Codes of a stack are (experts, out, in) also where the model has it transposed.
    """
    whole = stored.get((None, ""))
    for part, rows, span in _parts(target):
        if whole is not None:
            transposed = target.transposed and whole.name not in coded
            pieces = tuple(Piece(whole, expert, transposed, span) for expert in range(target.experts))
        else:
            entries = [stored.get((expert, part if span else "")) for expert in range(target.experts)]
            pieces = tuple(Piece(matrix) for matrix in entries if matrix is not None)
            if len(pieces) != target.experts:
                raise _Refused(f"the checkpoint has {len(pieces)} of {target.experts} matrices of `{target.name}`")
        yield FileTensor(f"{_expert_stem(target, part)}.weight", (target.experts, rows, target.in_features), "", pieces)


def _parts(target: Target) -> Iterator[tuple[str, int, tuple[int, int, int] | None]]:
    """Yield the parts of a stack's outputs: name, rows, and (first, step, count) of the rows, None for all of them."""
    names = ("gate", "up") if target.is_gate_up else (target.leaf.removesuffix("_proj"),)
    rows = target.out_features // len(names)
    for number, name in enumerate(names):
        span = (number, len(names), rows) if target.interleaved else (number * rows, 1, rows)
        yield name, rows, span if len(names) > 1 else None


def _expert_stem(target: Target, part: str) -> str:
    return f"blk.{_layer_of(target.name)}.ffn_{part}_exps"


def _layer_of(name: str) -> str:
    return next(part for part in name.split(".") if part.isdigit())


def _biases(target: Target, entry: TensorEntry) -> Iterator[FileTensor]:
    """Yield the biases (experts, out) of a stack's matrices, gate and up apart."""
    for part, rows, span in _parts(target):
        pieces = tuple(Piece(entry, expert, rows=span) for expert in range(target.experts))
        yield FileTensor(f"{_expert_stem(target, part)}.bias", (target.experts, rows), "", pieces)


def _latent(base: BaseModel, name: str, entry: TensorEntry) -> Iterator[FileTensor]:
    config: Any = base.config.get_text_config()
    layer = _layer_of(name)
    heads, keys, values, latent = (
        int(getattr(config, size)) for size in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    of_keys = Piece(entry, latent=(heads, 0, keys), turned=True)
    yield FileTensor(f"blk.{layer}.attn_k_b.weight", (heads, latent, keys), "", (of_keys,))
    of_values = Piece(entry, latent=(heads, keys, values))
    yield FileTensor(f"blk.{layer}.attn_v_b.weight", (heads, values, latent), "", (of_values,))


def _type(tensor: FileTensor, original: Original, matrices: str) -> str:
    is_vector = len(tensor.shape) == 1 or min(tensor.shape[-2:]) == 1
    if is_vector or "_norm" in tensor.name or "ffn_gate_inp" in tensor.name or tensor.name.endswith(".bias"):
        return _EXACT
    if all(_is_q4_0(piece, original) for piece in tensor.pieces):
        return Q4_0
    return matrices if tensor.shape[-1] % block_of(matrices).weights == 0 else _WIDE[matrices]


def _is_q4_0(piece: Piece, original: Original) -> bool:
    """Return whether the piece is INT4 without zero points, in groups of whole blocks, and stays as it is."""
    coded = original.weights.coded.get(piece.entry.name)
    if coded is None or coded.quantised is None or piece.entry.name in original.additions:
        return False
    quantised = coded.quantised
    plain = piece.expert is None and not piece.transposed and piece.latent is None
    whole = quantised.block[0] == 1 and quantised.block[1] % 32 == 0 and quantised.shape[-1] % quantised.block[1] == 0
    return plain and whole and quantised.method == "int4" and quantised.zero_point is None


def parameters(tensors: Iterable[FileTensor]) -> tuple[int, int]:
    """Return the numbers of weights outside of routed experts, and in them."""
    counts = {True: 0, False: 0}
    for tensor in tensors:
        counts["_exps." in tensor.name] += math.prod(tensor.shape)
    return counts[False], counts[True]
