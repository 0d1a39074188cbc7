"""The twin as a whole, stock beside rewritten: code around a block may read its class, its children or tensors.

Input: both models. Output: in which forward they differ. Blocks are compared one by one elsewhere; here the code
between them is run, which a rewrite does not change and which may still notice it. Outputs that transformers records
by hooks on modules are such code: a module that a rewrite no longer calls records nothing.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ktc.model.compare.comparison import Comparison, Values, compare, decided
from ktc.model.compare.feed import same_random_numbers
from ktc.model.experts.private_api import pytree
from ktc.model.hf.private_api import ATTENTION, recorded_outputs
from ktc.model.hf.stock_model import forget_positions, has_towers, vocabulary_of
from ktc.model.twin import with_image

BATCH, LENGTH, CACHED = 2, 24, 9
_IMAGE, _ANSWER = 7, 4  # the seed of its pixels, and the tokens of an answer
LONG = 1100  # tokens beyond what authors take as long
_ABSENT = object()  # the value of a setting that a config does not have

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Forward:
    name: str
    run: Callable[[PreTrainedModel, Tensor], Any]
    training: bool = False
    shape: tuple[int, int] = (BATCH, LENGTH)
    reader: str = "code around it reads its class or parts"


def _decoded(model: PreTrainedModel, tokens: Tensor) -> Any:
    with torch.no_grad():
        cache = model(input_ids=tokens[:, :CACHED], use_cache=True).past_key_values
        return model(input_ids=tokens[:, CACHED : CACHED + 1], past_key_values=cache, use_cache=True).logits


def _loss(model: PreTrainedModel, tokens: Tensor) -> Any:
    return model(input_ids=tokens, labels=tokens, use_cache=False)


def _alone(model: PreTrainedModel, tokens: Tensor) -> Any:
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False)


def _seen(model: PreTrainedModel, tokens: Tensor) -> Any:
    given = with_image(model, tokens, _IMAGE)
    return model(**given, labels=given["input_ids"], use_cache=False)


def _answered(model: PreTrainedModel, tokens: Tensor) -> Any:
    options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
    answer = cast("Any", model).generate(**with_image(model, tokens, _IMAGE), max_new_tokens=_ANSWER, **options)
    return answer.logits


FORWARDS = (
    _Forward("a loss", _loss),
    _Forward("a loss in training", _loss, training=True),
    _Forward("decoding with a cache", _decoded),
    _Forward(f"{LONG:,} tokens", _alone, shape=(1, LONG)),
)
WITH_IMAGES = (
    _Forward("a loss of text with an image", _seen),
    _Forward("a loss of text with an image in training", _seen, training=True),
    _Forward("answering about an image", _answered),
)


# Recorded outputs -----------------------------------------------------------------------------------------------------
def _recordings(model: PreTrainedModel) -> Iterator[_Forward]:
    """Yield a forward for each option of the config or of transformers' recorders that returns inner results."""
    recorders = map(recorded_outputs, _models(model))
    options = {f"output_{key}" for recorded in recorders for key in recorded}
    settings = vars(model.config.get_text_config()).items()
    options |= {name for name, value in settings if name.startswith("output_") and isinstance(value, bool)}
    for option in sorted({*options, "output_attentions", "output_hidden_states"}):
        reader = f"its modules, or hooks on them, return what `{option}` requests"
        yield _Forward(f"`{option}=True`", functools.partial(_recorded, option=option), reader=reader)


def _models(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    return (module for module in model.modules() if isinstance(module, PreTrainedModel))


def _recorded(model: PreTrainedModel, tokens: Tensor, option: str) -> Any:
    """Return the results with a loss and an option, set in the config and, where the forward takes it, in the call."""
    parameters = inspect.signature(model.forward).parameters
    taken = option in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    with _asked_for(model, option), torch.no_grad():
        return model(input_ids=tokens, labels=tokens, use_cache=False, **({option: True} if taken else {}))


@contextmanager
def _asked_for(model: PreTrainedModel, option: str) -> Generator[None]:
    """Set an option in the model's configs inside the context; only `eager` attention has weights to return."""
    configs = {id(part.config): vars(part.config) for part in _models(model)}.values()
    wanted = {option: True}
    if option == "output_attentions":
        wanted = {"_output_attentions": True, ATTENTION: "eager"}
    before = [(settings, name, settings.get(name, _ABSENT)) for settings in configs for name in wanted]
    try:
        for settings, name, _ in before:
            settings[name] = wanted[name]
        yield
    finally:
        for settings, name, value in before:
            if value is _ABSENT:
                settings.pop(name, None)
            else:
                settings[name] = value


# The comparison -------------------------------------------------------------------------------------------------------
def whole_difference(
    stock: PreTrainedModel, rewritten: PreTrainedModel, seed: int,
    in_double: Callable[[], tuple[PreTrainedModel, PreTrainedModel]],
) -> tuple[float, str]:  # fmt: skip
    """Return the largest error of all results, and in words the first forward that differs, "" if none does.

    Errors in fp32 add up over layers, and a choice of experts may tip over: those above the tolerance are decided on
    the models that `in_double` returns.
    """
    worst = 0.0
    with_images = WITH_IMAGES if has_towers(stock) else ()
    for forward in (*FORWARDS, *with_images, *_recordings(stock)):
        case = functools.partial(_compared, forward, seed)
        compared = decided(case(stock, rewritten), case, in_double)
        if compared.refused:
            if forward in with_images[:1]:
                log.warning("the twin of `%s` takes no image that ktc makes: none is compared", type(stock).__name__)
            continue
        if compared.raised:
            where = f"{forward.name} of the whole model: {forward.reader}"
            return compared.worst, f"it raises {compared.raised} in {where}"
        worst = max(worst, float("inf") if compared.alone else compared.worst)
        if compared.alone or compared.differing:
            return worst, f"results of the whole model, {forward.name}: {forward.reader}"
    return worst, ""


def _compared(forward: _Forward, seed: int, stock: PreTrainedModel, rewritten: PreTrainedModel) -> Comparison:
    def of_stock() -> Values:
        try:
            return _results(stock, forward, seed)
        except Exception:  # noqa: BLE001 - capture may have left tensors without data in objects of the model's file
            return _results(stock, forward, seed)  # the first call has used them up

    return compare(of_stock, lambda: _results(rewritten, forward, seed))


def _results(model: PreTrainedModel, forward: _Forward, seed: int) -> dict[str, Tensor | None]:
    """Return the results by number. Raises an exception for a result without data."""
    tokens = torch.randint(0, vocabulary_of(model), forward.shape, generator=torch.Generator().manual_seed(seed))
    model.train(forward.training)
    forget_positions(model)
    try:
        with same_random_numbers(seed):
            result = forward.run(model, tokens)
    finally:
        model.eval()
    tensors = [leaf.detach() for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    for tensor in tensors:
        float(tensor.sum())
    return {str(number): tensor for number, tensor in enumerate(tensors)}
