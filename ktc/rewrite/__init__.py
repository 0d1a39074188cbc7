"""Rewriting: torch.fx passes over copies of the block graphs, as the plan says. It chooses nothing."""

from ktc.rewrite.apply import PASSES, RewrittenBlock, rewrite, rewrite_block
from ktc.rewrite.recipe import recipe

__all__ = ["PASSES", "RewrittenBlock", "recipe", "rewrite", "rewrite_block"]
