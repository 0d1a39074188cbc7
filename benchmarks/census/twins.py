"""Compare two whole causal LMs of a family: the stock twin, and the one in which the loader's code realised a program.

Input: both models with equal weights, and the program's adapter. Output: a `TwinProof`: the worst error of the logits
of several inputs and of the gradients of the adapter, and whether greedy decoding gives the same tokens. A difference
in fp32 is decided in fp64. An input that the stock model itself refuses is a note.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, cast

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from census.types import TwinProof
from ktc.model.compare.comparison import Comparison, Values, compare, decided
from ktc.model.compare.feed import same_random_numbers
from ktc.model.graph.typed import named_modules
from ktc.model.hf.stock_model import forget_positions, has_towers, vocabulary_of
from ktc.model.loading import peft_glue
from ktc.model.twin import with_image

SEED = 4711
NEW_TOKENS = 8
_IMAGE = "logits with an image"


def compare_twins(
    program: str, stock: PreTrainedModel, realised: PreTrainedModel, adapter: Mapping[str, Any] | None
) -> TwinProof:
    """Return the comparison of two fp32 models on the CPU; `adapter` are arguments of `LoraConfig`.

    Weights of experts that the stock model keeps in a list of modules are not adapted: its adapter has another form.
    """
    adapter, notes = _common(adapter, stock)

    @cache
    def in_double() -> tuple[PreTrainedModel, PreTrainedModel]:
        return copy.deepcopy(stock).double(), copy.deepcopy(realised).double()

    compared: dict[str, Comparison] = {}
    for name, step in (_steps(adapter) | (_with_images(adapter) if has_towers(stock) else {})).items():
        case = partial(_compared, step)
        compared[name] = decided(case(stock, realised), case, in_double)
    errors = {name: error for each in compared.values() for name, error in each.errors.items()}
    raised = [f"{name}: it raises {each.raised}" for name, each in compared.items() if each.raised]
    alone = [f"{name}: one side alone has it" for each in compared.values() for name in sorted(each.alone)]
    logits = [error for name, error in errors.items() if name.startswith("logits")]
    return TwinProof(
        program,
        logits=max(logits, default=None),
        tokens=errors["tokens"] + errors.get("tokens about an image", 0.0) == 0 if "tokens" in errors else None,
        gradients={n.removeprefix("gradient of "): e for n, e in errors.items() if n.startswith("gradient of ")},
        difference="; ".join(raised or alone),
        image=errors.get(_IMAGE),
        notes=(*notes, *_refusals({name: each.refused for name, each in compared.items() if each.refused})),
    )


def _common(adapter: Mapping[str, Any] | None, stock: nn.Module) -> tuple[Mapping[str, Any] | None, tuple[str, ...]]:
    """Return the part of an adapter that both models can have, and a note on the rest."""
    if adapter is None:
        return None, ("the program has no adapter",)
    names = {name for name, _ in stock.named_parameters()}
    asked = cast("Sequence[str]", adapter["target_parameters"] or ())
    kept = [name for name in asked if name in names]
    left = len(asked) - len(kept)
    notes = (f"the adapter of {left} weights of experts in a list has no stock counterpart",) if left else ()
    return {**adapter, "target_parameters": kept or None}, notes


def _refusals(refused: Mapping[str, str]) -> Iterator[str]:
    for words in dict.fromkeys(refused.values()):
        yield f"stock refuses {', '.join(name for name in refused if refused[name] == words)}: {words}"


def _steps(adapter: Mapping[str, Any] | None) -> dict[str, Callable[[PreTrainedModel], Values]]:
    steps: dict[str, Callable[[PreTrainedModel], Values]] = {
        "logits": lambda model: {"logits": _logits(model, _tokens(model, 2, 24))},
        "logits with left padding": lambda model: {"logits with left padding": _padded_logits(model)},
        "logits with a cache": lambda model: {"logits with a cache": _cached_logits(model)},
        "greedy tokens": lambda model: {"tokens": _greedy(model)},
    }
    if adapter is not None:
        steps["LoRA gradients"] = lambda model: _gradients(copy.deepcopy(model), adapter)
    return steps


def _with_images(adapter: Mapping[str, Any] | None) -> dict[str, Callable[[PreTrainedModel], Values]]:
    steps: dict[str, Callable[[PreTrainedModel], Values]] = {
        _IMAGE: lambda model: {_IMAGE: _seen(model)},
        "an answer about an image": lambda model: {"tokens about an image": _answered(model)},
    }
    if adapter is not None:
        steps["LoRA gradients with an image"] = lambda model: {
            f"{name} with an image": gradient
            for name, gradient in _gradients(copy.deepcopy(model), adapter, image=True).items()
        }
    return steps


def _image(model: PreTrainedModel) -> dict[str, Tensor]:
    return with_image(model, _tokens(model, 1, 20), SEED)


@torch.no_grad()
def _seen(model: PreTrainedModel) -> Tensor:
    return cast("Tensor", model(**_image(model), use_cache=False).logits)


def _answered(model: PreTrainedModel) -> Tensor:
    given = _image(model)
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    made = cast("Any", model).generate(**given, **options)
    return cast("Tensor", made)[:, given["input_ids"].shape[1] :] + 1.0


def _compared(
    step: Callable[[PreTrainedModel], Values], stock: PreTrainedModel, realised: PreTrainedModel
) -> Comparison:
    for model in (stock, realised):
        forget_positions(model)
    return compare(partial(step, stock), partial(step, realised))


def _tokens(model: PreTrainedModel, batch: int, length: int) -> Tensor:
    vocabulary = vocabulary_of(model)
    return torch.randint(3, vocabulary, (batch, length), generator=torch.Generator().manual_seed(SEED + length))


def _padded(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Return three rows of tokens and their mask: none, some and most of a row is padding, on the left."""
    tokens, mask = _tokens(model, 3, 19), torch.ones(3, 19, dtype=torch.long)
    mask[1, :5] = mask[2, :13] = 0
    return tokens, mask


@torch.no_grad()
def _logits(model: PreTrainedModel, tokens: Tensor, **more: Any) -> Tensor:
    return cast("Tensor", model(input_ids=tokens, use_cache=False, **more).logits)


def _padded_logits(model: PreTrainedModel) -> Tensor:
    tokens, mask = _padded(model)
    return _logits(model, tokens, attention_mask=mask)[mask.bool()]


@torch.no_grad()
def _cached_logits(model: PreTrainedModel) -> Tensor:
    """Return the logits of a prompt and of three further tokens, each in a call of its own."""
    tokens = _tokens(model, 2, 14)
    out = model(input_ids=tokens[:, :11], use_cache=True)
    found = [cast("Tensor", out.logits)]
    for place in range(11, 14):
        out = model(input_ids=tokens[:, place : place + 1], past_key_values=out.past_key_values, use_cache=True)
        found.append(cast("Tensor", out.logits))
    return torch.cat(found, 1)


def _greedy(model: PreTrainedModel) -> Tensor:
    tokens, mask = _padded(model)
    made = cast("Any", model).generate(
        tokens, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
        pad_token_id=0,
    )  # fmt: skip
    return cast("Tensor", made)[:, tokens.shape[1] :] + 1.0  # no token is zero, for relative errors


def _gradients(model: PreTrainedModel, adapter: Mapping[str, Any], *, image: bool = False) -> Values:
    """Return the gradient of every factor of the adapter, in train mode, of the loss of padded rows or of an image."""
    peft_glue.install()
    tuned = cast("nn.Module", get_peft_model(model, LoraConfig(**adapter)))
    factors = dict(_randomised(tuned))
    given = _image(model) if image else dict(zip(("input_ids", "attention_mask"), _padded(model), strict=True))
    tokens, mask = given["input_ids"], given["attention_mask"]
    rows = _logits(model, tokens[:1]).shape[-1]  # a padded vocabulary has fewer logits
    labels = tokens.clamp(max=rows - 1).masked_fill(mask == 0, -100)
    tuned.train()
    with same_random_numbers(SEED):
        tuned(**given, labels=labels, use_cache=False).loss.backward()
    zero = torch.zeros(())
    return {f"gradient of {name}": zero if p.grad is None else p.grad for name, p in factors.items()}


def _randomised(tuned: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Give every factor random values by its name: PEFT begins with B = 0, where A has no gradient."""
    dtype = next(p.dtype for _, module in named_modules(tuned) for p in module.parameters(recurse=False))
    for name, parameter in tuned.named_parameters():
        if ".lora_" in name:
            generator = torch.Generator().manual_seed(SEED + zlib.crc32(name.encode()))
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator).to(dtype)
            yield name, parameter
