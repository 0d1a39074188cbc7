"""Run one forward of a model on meta tensors and record the call of every block.

A block that cannot run without data has a placeholder result, so that later blocks still run. A block that loops over
a list of experts runs as if all were chosen. Refused: a model whose code around the blocks does not run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.stage_progress import tell
from ktc.model.experts.private_api import pytree
from ktc.model.hf.foreign_errors import first_line, raised_by
from ktc.model.hf.private_api import takes_bool_masks
from ktc.stages.capture.data_masks import masks_from_data
from ktc.stages.capture.expert_hits import DependsOnData
from ktc.stages.capture.expert_list import candidates
from ktc.stages.capture.export import BATCH, SEQUENCE
from ktc.stages.capture.forwards import replaced_forwards
from ktc.stages.capture.markers import masks_given
from ktc.stages.capture.reasons import reason_of
from ktc.stages.capture.unrolled import all_experts_routed

Call = tuple[tuple[Any, ...], dict[str, Any]]


def record(model: PreTrainedModel, blocks: Mapping[str, nn.Module]) -> tuple[dict[str, Call], dict[str, str]]:
    """Return the arguments of every block, and why some cannot run on meta. Raises InputRefused (I107)."""
    # The result of a block that cannot run is unknown: hidden states, or a tuple that begins with them.
    error: Exception | None = None
    guesses: tuple[Callable[[str], bool], ...] = (
        lambda fqn: "attn" in fqn.rpartition(".")[2], lambda _: True, lambda _: False
    )  # fmt: skip
    for returns_tuple in guesses:
        calls, failed = dict[str, Call](), dict[str, str]()
        try:
            _run(model, blocks, calls, failed, returns_tuple)
        except Exception as raised:  # noqa: BLE001 - code around the blocks raises anything
            error = error or raised
            if failed:
                continue
            break
        return calls, failed
    message = f"the model of this config does not run: {type(error).__name__}: {first_line(error)}"
    raise InputRefused(Diagnostic("I107", message, hint=raised_by(error) if error else "")) from error


def _run(
    model: PreTrainedModel, blocks: Mapping[str, nn.Module], calls: dict[str, Call], failed: dict[str, str],
    returns_tuple: Callable[[str], bool],
) -> None:  # fmt: skip
    """Run one forward, and fill `calls` and `failed`. The result of a block that fails is made up."""

    def recording(fqn: str, block: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            calls.setdefault(fqn, (args, kwargs))
            tell(len(calls), len(blocks))
            try:
                return _run_block(block, original, args, kwargs)
            except Exception as raised:  # noqa: BLE001 - a foreign block that raises is opaque, with the message
                reason, masked = raised, _with_mask(model, args, kwargs)
                if masked is not None:
                    try:
                        with masks_given(), masks_from_data(block, original, args, masked):
                            result = original(*args, **masked)
                    except Exception as with_mask:  # noqa: BLE001 - as above; stock code always has the mask here
                        reason = with_mask
                    else:
                        calls[fqn] = args, masked
                        return result
                failed[fqn] = reason_of(reason)
                hidden = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
                stand_in = torch.empty_like(hidden)
                return (stand_in, None) if returns_tuple(fqn) else stand_in

        return forward

    # A `forward` of the instance may be that of an experts module of the model's own, which is a marker.
    watched = [(block, recording(fqn, block, block.forward)) for fqn, block in blocks.items()]
    with replaced_forwards(watched), torch.no_grad():
        model(input_ids=torch.zeros(BATCH, SEQUENCE, dtype=torch.long, device="meta"), use_cache=False)


def _with_mask(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Return the call with an explicit mask, if a block takes one and received none: some attention computes with it.

    Stock models use a boolean mask for the sdpa kernel, and a mask of scores for eager code without another kernel.
    """
    if "attention_mask" not in kwargs or kwargs["attention_mask"] is not None:
        return None
    hidden = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    batch, length = hidden.shape[:2]
    dtype = torch.bool if takes_bool_masks(model) else model.dtype
    return {**kwargs, "attention_mask": torch.ones(batch, 1, length, length, dtype=dtype, device="meta")}


def _run_block(block: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the block's result. If it reads data and the block has lists, run it as if all of a list were chosen."""
    try:
        return original(*args, **kwargs)
    except Exception:
        branch: DependsOnData | None = None
        for _, modules in candidates(block):
            try:
                with all_experts_routed(modules):
                    return original(*args, **kwargs)
            except DependsOnData as error:
                branch = error
            except Exception:  # noqa: BLE001 - another list may be the right one; the first error is reported
                continue
        if branch is not None:
            raise branch from None
        raise
