"""`RouterForm`: what a router computes from its logits, and `RouterSpec`: a kernel for one form."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from ktc.foundation.isa import INSTRUCTION_SETS, PREFERENCE, Isa

Scoring = Literal["softmax", "sigmoid", "sqrt_softplus"]
GroupScore = Literal["greatest", "two_greatest"]
Total = Literal["none", "plus", "at_least"]
Dtype = Literal["bf16", "fp16", "fp32"]

ISAS: Final = tuple(isa for isa in PREFERENCE if INSTRUCTION_SETS[isa].linear)


@dataclass(frozen=True, slots=True)
class RouterForm:
    """The routing of one model: logits (T, E) become weights (T, k) and expert numbers (T, k), the best first.

    Scores of all experts, or with `late` of the chosen ones alone, follow from the logits by `scoring`. Where it is
    `corrected`, a bias (E,) is added for the choice alone. Experts outside the `top_groups` best of `groups` have the
    value `limited` in the choice, None for -inf. A group counts by its greatest value, or by the sum of its two.

    A weight is the score of a chosen expert, or the value that was compared where it `takes_limited`. It is multiplied
    by `picked_scale`, divided by the `total` of all k (plus `total_constant`, or at least that), and multiplied by
    `scale`.

    The model has the best expert first where they are `in_order`, and kernels always.

    `logits`, `scores` and `compared` are "fp32" where the model computes them in fp32, and otherwise "": logits then
    have the dtype of the hidden states, scores that of the logits, and compared values that of the scores. `weights`
    are "hidden" where they have the dtype of the hidden states, otherwise that of the scores.
    """

    num_experts: int
    top_k: int
    scoring: Scoring
    late: bool = False
    corrected: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "greatest"
    limited: float | None = None
    takes_limited: bool = False
    picked_scale: float = 1.0
    total: Total = "none"
    total_constant: float = 0.0
    scale: float = 1.0
    in_order: bool = True
    logits: Literal["", "fp32"] = ""
    scores: Literal["", "fp32"] = ""
    compared: Literal["", "fp32"] = ""
    weights: Literal["", "hidden"] = ""

    def dtypes(self, hidden: Dtype) -> Mapping[str, Dtype]:
        """Return the dtypes of logits, scores, compared values and weights for those of the hidden states."""
        logits: Dtype = "fp32" if self.logits else hidden
        scores: Dtype = "fp32" if self.scores else logits
        return {
            "logits": logits, "scores": scores, "compared": "fp32" if self.compared else scores,
            "weights": hidden if self.weights else scores,
        }  # fmt: skip

    def __str__(self) -> str:
        """Describe the routing in words, for a plan."""
        late, corrected = " over the chosen" * self.late, ", + bias" * self.corrected
        grouped = f", {self.top_groups} of {self.groups} groups" * (self.groups > 1)
        ending = ", renormalised" * (self.total != "none") + ", scaled" * (self.scale * self.picked_scale != 1)
        scoring = self.scoring.replace("sqrt_softplus", "sqrt(softplus)")
        return f"{scoring}{late}{corrected}{grouped}, top {self.top_k} of {self.num_experts}{ending}"


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """One kernel, for routers of one form. `dtype` is that of logits, `hidden` of hidden states; sums are fp32."""

    op: Literal["router"]
    form: RouterForm
    dtype: Dtype
    hidden: Dtype
    isa: Isa

    @property
    def entry(self) -> str:
        """The name under which the kernel library exposes it. It ends with a digest of the whole form."""
        form = self.form
        digest = hashlib.sha256(repr(form).encode()).hexdigest()[:8]
        return f"Router_{form.scoring}_{form.num_experts}_{form.top_k}_{digest}_{self.hidden}_{self.isa}"

    @property
    def summary(self) -> tuple[str, ...]:
        """Describe the computation and its sizes, for a table of kernels."""
        return "router", "any", "any", str(self.form.num_experts), str(self.form.top_k), self.dtype
