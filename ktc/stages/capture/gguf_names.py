"""Tensor names in GGUF files, for the architectures that ktc reads.

Input: the model on meta and the file's architecture. Output: the source of each tensor of the model. The names are the
`gguf` package's. Further conversions are listed per architecture. Refused (I122): an unlisted architecture, since its
tensors may be permuted, split or shifted in unknown ways.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ktc.diagnostics import Diagnostic, InputRefused, listing
from ktc.model.checkpoint import Part, Span, Step
from ktc.model.checkpoint.gguf_architectures import ARCHITECTURES, gguf_name_of
from ktc.model.experts.layouts.stock_layout import StockTensor, half_of
from ktc.model.hf.conversions import STACKED_PARTS
from ktc.model.kernels.form import ExpertsForm, parse_form
from ktc.stages.capture.forms import UNSUPPORTED, form_of

_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class GgufPlace:
    """A tensor of the file, `name`, and the part of `target` that it fills; the fields are those of `WeightSource`."""

    name: str
    target: str
    part: Part | None = None
    steps: tuple[Step, ...] = ()
    span: Span | None = None
    stride: int = 1
    viewed: tuple[int, ...] = ()


Choices = tuple[tuple[GgufPlace, ...], ...]  # alternative ways to fill a tensor; the first available one is used


def gguf_places(model: PreTrainedModel, architecture: str) -> Mapping[str, Choices]:
    """Return, for each tensor of `model`, the names that may fill it; empty if the format has no name for it.

    Raises `InputRefused` (I122) for an unsupported architecture or one of another model.
    """
    kind = str(model.config.model_type)
    if kind not in ARCHITECTURES.get(architecture, ()):
        raise InputRefused(_not_read(architecture, kind))
    name_of = gguf_name_of(architecture, model.config.get_text_config().num_hidden_layers)
    forms = _Forms()
    targets = cast("Mapping[str, Tensor]", model.state_dict())
    return {
        target: tuple(_choices(model, target, tensor, name_of, architecture, forms))
        for target, tensor in targets.items()
    }


def _not_read(architecture: str, kind: str) -> Diagnostic:
    readable = [name for name, kinds in ARCHITECTURES.items() if kind in kinds]
    if architecture in ARCHITECTURES:
        message = f"the GGUF file is of architecture `{architecture}`, config.json of a `{kind}` model"
        hint = "use config.json of the model that was converted"
    else:
        message = f"the GGUF file is of architecture `{architecture}`, whose conversion ktc cannot undo"
        hint = f"ktc reads {listing(ARCHITECTURES)}; use the model's safetensors"
    if readable and architecture not in ARCHITECTURES:
        hint = f"a `{kind}` model is read from a file of architecture `{readable[0]}`"
    return Diagnostic("I122", message, hint=hint)


class _Forms:
    """Return a function that reads the form of an experts module, once per class."""

    def __init__(self) -> None:
        self._by_class: dict[type[nn.Module], str] = {}

    def of(self, module: nn.Module) -> ExpertsForm | None:
        kind = type(module)
        if kind not in self._by_class:
            self._by_class[kind] = form_of(module)
        spelled = self._by_class[kind]
        return None if spelled.startswith(UNSUPPORTED) else parse_form(spelled)


def _choices(
    model: PreTrainedModel,
    target: str,
    tensor: Tensor,
    name_of: Callable[[str], str | None],
    architecture: str,
    forms: _Forms,
) -> Iterator[tuple[GgufPlace, ...]]:
    parent, _, leaf = target.rpartition(".")
    part = STACKED_PARTS.get(leaf)
    layer = _LAYER.search(target)
    if part is not None and tensor.dim() == (2 if part.endswith("bias") else 3) and layer:
        form = forms.of(model.get_submodule(parent))
        if form is not None:
            yield tuple(_experts(form, target, cast("StockTensor", leaf), tensor, int(layer[1])))
        return
    name = name_of(target)
    if name is not None:
        yield (GgufPlace(name, target, steps=_steps(architecture, model.config, name)),)
    if architecture == "deepseek2" and leaf == "weight" and parent.endswith(".kv_b_proj") and layer:
        yield tuple(_latent(model.config, target, int(layer[1])))


def _experts(form: ExpertsForm, target: str, leaf: StockTensor, tensor: Tensor, layer: int) -> Iterator[GgufPlace]:
    """Yield stacks of matrices (E, out, in), gate and up separate, in the model's layout."""
    biased = leaf.endswith("_bias")
    suffix, ending = ("bias", "_bias") if biased else ("weight", "")
    steps = (Step("transpose", (1, 2)),) if form.transposed and not biased else ()
    if not leaf.startswith("gate_up"):
        kind = leaf.partition("_")[0]
        yield GgufPlace(f"blk.{layer}.ffn_{kind}_exps.{suffix}", target, cast("Part", kind + ending), steps)
        return
    columns = tensor.shape[2 if form.transposed and not biased else 1]
    for kind in ("gate", "up"):
        part = cast("Part", kind + ending)
        span, stride = half_of(form, leaf, part, columns // 2)
        yield GgufPlace(f"blk.{layer}.ffn_{kind}_exps.{suffix}", target, part, steps, span, stride)


def _steps(architecture: str, config: PreTrainedConfig, name: str) -> tuple[Step, ...]:
    if architecture == "llama" and name.endswith((".attn_q.weight", ".attn_k.weight")):
        heads = config.num_attention_heads if name.endswith(".attn_q.weight") else config.num_key_value_heads
        return (Step("deinterleave_runs", (0, heads)),)
    return ()


def _latent(config: PreTrainedConfig, target: str, layer: int) -> Iterator[GgufPlace]:
    """Yield `kv_b_proj` in two parts: keys (heads, latent, n), each head transposed, and values (heads, v, latent)."""
    heads, keys, values, latent = (
        int(getattr(config, name)) for name in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    viewed = (heads, keys + values, latent)
    turned = (Step("transpose", (1, 2)),)
    yield GgufPlace(f"blk.{layer}.attn_k_b.weight", target, None, turned, Span(1, 0, keys), viewed=viewed)
    yield GgufPlace(f"blk.{layer}.attn_v_b.weight", target, None, (), Span(1, keys, values), viewed=viewed)
