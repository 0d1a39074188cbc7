"""The census of a family, as frozen values with plain JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ktc.model.compare.errors import TOLERANCE

MATCHED, NONE = "matched", "none"  # verdicts; every other one is `opaque: ` and a reason

Component = Literal["experts", "attention"]


@dataclass(frozen=True, slots=True)
class BlockProof:
    """The proof of one distinct rewrite. Errors are relative Frobenius norms; `failure` is set if there are none."""

    part: Component
    block: str
    class_name: str
    forward: float = 0.0
    gradients: Mapping[str, float] = field(default_factory=dict[str, float])
    holds: bool = False
    failure: str = ""

    @property
    def wrong(self) -> bool:
        """Whether the two were compared and differ: a bug in a pattern or a pass."""
        return not self.holds and not self.failure


@dataclass(frozen=True, slots=True)
class TwinProof:
    """The whole twin with a program realised, beside stock. Errors are relative Frobenius norms, the worst of a kind.

    `logits` is None if stock itself computes none; `tokens` is whether greedy decoding is the same. `difference` names
    the values of one side alone, `failure` the reason why nothing was compared, `notes` the parts that were not.
    """

    program: str
    logits: float | None = None
    tokens: bool | None = None
    gradients: Mapping[str, float] = field(default_factory=dict[str, float])
    difference: str = ""
    failure: str = ""
    notes: tuple[str, ...] = ()
    image: float | None = None  # the error of the logits of text with an image

    @property
    def worst_gradient(self) -> float | None:
        """The largest error of the gradients of all LoRA factors, None without."""
        return max(self.gradients.values(), default=None)

    @property
    def wrong(self) -> bool:
        """Whether the two were compared and differ."""
        errors = (self.logits or 0.0, self.worst_gradient or 0.0)
        return bool(self.difference) or self.tokens is False or not all(error <= TOLERANCE for error in errors)

    @property
    def equal(self) -> bool:
        """Whether the two were compared and do not differ."""
        return self.logits is not None and not self.failure and not self.wrong

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        worst = max(self.gradients, key=lambda name: self.gradients[name], default=None)
        return {
            "program": self.program, "logits": _finite(self.logits), "same_tokens": self.tokens,
            "worst_lora_gradient": _finite(self.worst_gradient), "worst_lora_gradient_of": worst,
            "lora_gradients": len(self.gradients), "wrong": self.wrong, "difference": self.difference or None,
            "failure": self.failure or None, "image": _finite(self.image), "notes": list(self.notes),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """One family. Each verdict is `matched`, `none` for a missing part, or `opaque: ` and the reason.

    `router`, `shared_experts` and `attention_kinds` describe the twin's computation, matched or not. `reasons` list why
    the family is not matched and proven as a whole, the most important one first.
    """

    family: str
    experts: str = "opaque: not reached"
    routing: str = "opaque: not reached"
    attention: str = "opaque: not reached"
    router: str = ""
    activation: str = ""
    shared_experts: str = ""
    attention_kinds: tuple[str, ...] = ()
    proofs: tuple[BlockProof, ...] = ()
    twins: tuple[TwinProof, ...] = ()
    near_miss: str = ""
    reasons: tuple[str, ...] = ()
    seconds: float = 0.0
    towers: bool = False  # examined as the class of images and text

    @property
    def matched(self) -> bool:
        """Whether the experts of every layer are rewritten."""
        return self.experts == MATCHED

    @property
    def proven(self) -> bool:
        """Whether something was rewritten and every rewrite equals the original."""
        return bool(self.proofs) and all(proof.holds for proof in self.proofs)

    @property
    def wrong(self) -> bool:
        """Whether a rewrite or a whole twin computes something else."""
        return any(proof.wrong for proof in (*self.proofs, *self.twins))

    @property
    def equal(self) -> bool:
        """Whether the whole twin equals stock in every program."""
        return bool(self.twins) and all(proof.equal for proof in self.twins)

    @property
    def sees(self) -> bool:
        """Whether the whole twin equals stock with an image too, in every program that applies to it."""
        compared = [proof for proof in self.twins if not proof.failure]
        return bool(compared) and all(proof.equal and proof.image is not None for proof in compared)

    @property
    def worst_forward(self) -> float | None:
        """The largest forward error of all rewrites, None where none was measured."""
        return max((p.forward for p in self.proofs if not p.failure), default=None)

    @property
    def gradients(self) -> dict[str, float]:
        """The largest error of each gradient over all rewrites."""
        worst: dict[str, float] = {}
        for proof in self.proofs:
            for name, error in proof.gradients.items():
                worst[name] = max(worst.get(name, error), error)
        return worst

    @property
    def worst_gradient(self) -> float | None:
        """The largest error of all gradients, None if none was measured."""
        return max(self.gradients.values(), default=None)

    def to_json(self) -> dict[str, Any]:
        """Return plain values; `proofs` has one row per distinct rewrite."""
        return {
            "family": self.family, "matched": self.matched, "proven": self.proven, "equal": self.equal,
            "experts": self.experts,
            "routing": self.routing, "attention": self.attention, "router": self.router,
            "activation": self.activation, "shared_experts": self.shared_experts,
            "attention_kinds": list(self.attention_kinds), "worst_forward": _finite(self.worst_forward),
            "worst_gradient": _finite(self.worst_gradient),
            "gradients": {name: _finite(error) for name, error in sorted(self.gradients.items())},
            "near_miss": self.near_miss or None, "reasons": list(self.reasons),
            "proofs": [
                {
                    "part": p.part, "block": p.block, "class": p.class_name, "forward": _finite(p.forward),
                    "worst_gradient": _finite(max(p.gradients.values(), default=0.0)), "holds": p.holds,
                    "failure": p.failure or None,
                }
                for p in self.proofs
            ],
            "twins": [proof.to_json() for proof in self.twins],
            "towers": self.towers,
            "seconds": round(self.seconds, 2),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Census:
    """The families that were examined, sorted, of `asked` in total, with the versions of the dependencies.

    It took `seconds` with `jobs` families at a time.
    """

    versions: Mapping[str, str]
    families: tuple[Family, ...]
    asked: int
    seconds: float = 0.0
    jobs: int = 1

    @property
    def wrong(self) -> tuple[Family, ...]:
        """The families with a wrong rewrite or a twin that differs."""
        return tuple(f for f in self.families if f.wrong)

    def counts(self) -> dict[str, int]:
        """Return the numbers of families matched, proven, with recognised routing, with recognised attention, equal as
        whole twins, equal with an image, and wrong.
        """
        return self._counts(self.families)

    def counts_of(self, *, towers: bool) -> dict[str, int]:
        """Return `counts` of the families of text, or of those with towers."""
        return self._counts([family for family in self.families if family.towers == towers])

    def _counts(self, found: Sequence[Family]) -> dict[str, int]:
        return {
            "families": len(found),
            "matched": sum(f.matched for f in found),
            "proven": sum(f.matched and f.proven for f in found),
            "routing": sum(f.matched and f.routing == MATCHED for f in found),
            "attention": sum(f.attention == MATCHED for f in found),
            "equal": sum(f.equal for f in found),
            "image": sum(f.sees for f in found),
            "wrong": sum(f.wrong for f in found),
        }

    def to_json(self) -> dict[str, Any]:
        """Return the object that `ktc census --json` prints."""
        return {
            "versions": dict(self.versions),
            "counts": self.counts(),
            "complete": len(self.families) == self.asked,
            "seconds": round(self.seconds, 1),
            "jobs": self.jobs,
            "families": [family.to_json() for family in self.families],
        }


def _finite(number: float | None) -> float | str | None:
    """Convert infinity and NaN, which JSON lacks, to text."""
    return number if number is None or abs(number) < float("inf") else str(number)
