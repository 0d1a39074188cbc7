"""The table of embeddings, where it may stay in host memory while a GPU reads the rows of tokens.

In: a draft. Out: the table and its GPU, or None. Another module that shares the weight, as a tied head, reads it as a
whole in each step; a class with code of its own may too.
"""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from ktc.stages.plan.draft import PlanDraft
from ktc.stages.plan.placement import device_of
from ktc.stages.plan.types import HostTable


def host_table(draft: PlanDraft) -> HostTable | None:
    """Return the table and the GPU that reads it, None where it must be in that GPU's memory, or is on the CPU."""
    fqn = draft.captured.ends[0]
    if not fqn or draft.mode == "train":
        return None
    module, device = draft.captured.model.get_submodule(fqn), device_of(fqn, draft.devices)
    if device == "cpu" or type(module) is not nn.Embedding or module.max_norm is not None:
        return None
    named = cast("Any", draft.captured.model).named_parameters(remove_duplicate=False)
    shared = sum(parameter is module.weight for _, parameter in named) > 1
    return None if shared else HostTable(fqn, device)
