"""Proof: what the loader will realise, beside the stock modules at every site of a small witness of the whole depth."""

from ktc.prove.run import failures, prove, prove_on, reason
from ktc.prove.types import Constant, Proof
from ktc.prove.witness import Witness, carried_over, realised, witness_for, witness_of

__all__ = [
    "Constant", "Proof", "Witness", "carried_over", "failures", "prove", "prove_on", "realised", "reason", "witness_for",
    "witness_of",
]  # fmt: skip
