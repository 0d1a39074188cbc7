"""Proof: every distinct rewrite runs against the original block on a small witness, forward and all gradients."""

from ktc.prove.compare import Proof, compare
from ktc.prove.run import prove

__all__ = ["Proof", "compare", "prove"]
