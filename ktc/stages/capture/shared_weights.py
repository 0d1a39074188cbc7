"""Experts whose weights are shared with another layer, or among each other: their block keeps its own code.

In: a model on meta tensors. Out: for a block that shares weights, the reason. Stock code ties tensors, or has one
module at two places. Kernels pack the experts of every layer separately, so training and refreshing would treat a
shared weight as several.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import cast

from torch import nn
from transformers import PreTrainedModel


def shared_names(model: PreTrainedModel) -> Mapping[str, str]:
    """Return, for each parameter that is one with another, the name of one of the others."""
    groups = defaultdict[int, list[str]](list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups[id(parameter)].append(name)
    others = {name: names[names[0] == name] for names in groups.values() if len(names) > 1 for name in names}
    tied = cast("dict[str, str]", getattr(model, "all_tied_weights_keys", None) or {})
    return {**tied, **{original: copy for copy, original in tied.items()}, **others}


def sharing(fqn: str, block: nn.Module, shared: Mapping[str, str], below: Collection[str] = ("",)) -> str:
    """Return why weights in the modules `below` the block at `fqn` are others' too, as the end of a sentence, or ""."""
    for path in below:
        place = f"{fqn}.{path}".rstrip(".")
        for name, _ in block.get_submodule(path).named_parameters(prefix=place, remove_duplicate=False):
            if name in shared:
                weight = name.removeprefix(f"{fqn}.")
                return (
                    f"its `{weight}` is also `{shared[name]}`, and kernels pack experts whose weights are theirs alone"
                )
    return ""
