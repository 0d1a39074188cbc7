"""Proof: what the loader will realise, beside the stock modules at every site of a small twin of the whole depth."""

from ktc.stages.proof.run import prove, prove_on, reason, refuted
from ktc.stages.proof.twins import ProofTwin, as_twin, carried_over, realised, twin_of_model
from ktc.stages.proof.types import Constant, Proof

__all__ = [
    "Constant",
    "Proof",
    "ProofTwin",
    "as_twin",
    "carried_over",
    "prove",
    "prove_on",
    "realised",
    "reason",
    "refuted",
    "twin_of_model",
]  # fmt: skip
