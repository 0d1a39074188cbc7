"""Rewriting: torch.fx passes over copies of the block graphs, as the plan says. It chooses nothing."""

from ktc.rewrite.apply import PASSES, RewrittenBlock, rewrite, rewrite_block
from ktc.rewrite.expert_rows import stack_rows
from ktc.rewrite.recipe import block_file, block_files, recipe
from ktc.rewrite.streams import stream_rows
from ktc.rewrite.uncaptured import uncaptured_rows

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
