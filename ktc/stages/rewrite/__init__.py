"""Rewriting: torch.fx passes over copies of the block graphs, as the plan says. It chooses nothing."""

from ktc.stages.rewrite.apply import PASSES, RewrittenBlock, rewrite, rewrite_block
from ktc.stages.rewrite.expert_rows import stack_rows
from ktc.stages.rewrite.recipe import block_file, block_files, linear_steps, recipe

__all__ = [
    "PASSES",
    "RewrittenBlock",
    "block_file",
    "block_files",
    "linear_steps",
    "recipe",
    "rewrite",
    "rewrite_block",
    "stack_rows",
]  # fmt: skip
