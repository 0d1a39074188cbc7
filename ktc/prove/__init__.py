"""Proof: run every distinct rewrite against the original block on a small witness, forward and all gradients."""

from ktc.prove.compare import Proof, compare
from ktc.prove.run import Witness, prove, prove_block, witness_of

__all__ = ["Proof", "Witness", "compare", "prove", "prove_block", "witness_of"]
