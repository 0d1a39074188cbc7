"""Rewriting: torch.fx passes over copies of the block graphs, as the plan says. It chooses nothing."""

from ktc.stages.rewrite.apply import PASSES, RewrittenBlock, rewrite, rewrite_block
from ktc.stages.rewrite.expert_rows import stack_rows
from ktc.stages.rewrite.recipe import block_file, block_files, recipe
from ktc.stages.rewrite.streams import stream_rows
from ktc.stages.rewrite.uncaptured import uncaptured_rows

__all__ = [
    "PASSES",
    "RewrittenBlock",
    "block_file",
    "block_files",
    "recipe",
    "rewrite",
    "rewrite_block",
    "stack_rows",
    "stream_rows",
    "uncaptured_rows",
]  # fmt: skip
