"""Proof: what the loader will realise, beside the stock modules at every site of a small witness of the whole depth."""

from ktc.stages.proof.run import prove, prove_on, reason, refuted
from ktc.stages.proof.types import Constant, Proof
from ktc.stages.proof.witness import Witness, carried_over, realised, witness_for, witness_of

__all__ = [
    "Constant", "Proof", "Witness", "carried_over", "prove", "prove_on", "realised", "reason", "refuted",
    "witness_for",
    "witness_of",
]  # fmt: skip
