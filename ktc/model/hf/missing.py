"""Why a checkpoint lacks a tensor of the model: the known causes, by its files and config.json."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedConfig

from ktc.diagnostics import listing
from ktc.model.checkpoint import CheckpointIndex
from ktc.model.checkpoint.shards import absent_shards
from ktc.model.hf.named_class import not_a_causal_lm


def why_missing(config: PreTrainedConfig, index: CheckpointIndex, unused: Sequence[str]) -> str:
    """Return the hint about absent tensors: another kind of model, absent shards, other names, or a part of a model.

    `unused` are the tensors of the checkpoint that the model has no place for.
    """
    if other := not_a_causal_lm(config):
        return other
    if absent := absent_shards(index.files):
        return f"download or copy {listing(absent, 3)}, which belong to the numbered shards"
    if unused:
        return f"the checkpoint has {listing(unused, 3)}, for which the model that config.json describes has no place"
    return "no shard is absent, so the checkpoint was saved without it: give the one of the whole model"
