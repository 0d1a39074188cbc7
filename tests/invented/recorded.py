"""Inner results that a call asks for: hidden states, attention weights, router logits and the loss made of them.

In: a compiled model and the stock model of one folder. Out: the error of each result, by option. A family that returns
none of them is not called.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from invented.calls import Inputs, inputs
from invented.errors import relative

_OPTIONS = ("output_hidden_states", "output_attentions", "output_router_logits", "output_experts")


def recorded_errors(ours: PreTrainedModel, exact: PreTrainedModel) -> Iterator[tuple[str, float]]:
    """Yield the error of all results with each option that the model's recorders or config know."""
    known = {f"output_{key}" for part in exact.modules() for key in getattr(part, "_can_record_outputs", None) or {}}
    known |= vars(exact.config).keys() & {"output_router_logits"}
    for option in [option for option in _OPTIONS if option in known]:
        call = {**inputs()["3 x 37, padded left"], option: True}
        wanted, found = _results(exact, call), _results(ours, call)
        equal = wanted.keys() == found.keys()
        yield option, max(map(relative, found.values(), wanted.values()), default=0.0) if equal else math.inf


def _results(model: PreTrainedModel, call: Inputs) -> dict[str, Tensor]:
    """Return every tensor of the results by its place, and the loss with them."""
    with torch.no_grad():
        result = model.eval()(**call, labels=call["input_ids"], use_cache=False)
    leaves = pytree.tree_flatten_with_path(dict(result))[0]
    return {str(place): leaf for place, leaf in leaves if isinstance(leaf, Tensor)}
