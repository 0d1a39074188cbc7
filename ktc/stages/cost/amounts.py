"""How much a work computes, reads and issues in one call of a use, whatever the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ktc.model.experts.layouts.panel_codes import MOST_ROWS
from ktc.stages.cost.types import SPLIT_ROWS, Core, Use, Work

_BACK: Final = 2.0  # moved bytes of backward, in those of forward
_ISSUED_BACK: Final = 1.25  # time to issue backward, in that of forward: twice the kernels, but by autograd in C++
_FUSED_NORM: Final = 7  # kernels that a norm in a CUDA graph has less
_ROTATION: Final = 8  # those that attention has less there, whose rotary positions are one kernel
# Of routed experts, in operators of other modules, which are cheaper for Python. Half a millisecond for a chunk.
_GROUPED: Final = 26  # as one grouped product each for gate and up, and for down
_ROUTED, _CHUNK = 15, 13  # of kernels' experts on a GPU: sorting and sums, and then each chunk
# Of a stacked training step, whose layers are compiled: the time to issue their parts in that to issue their operators
# one by one without norms, which are in the kernels beside them. Routing and what follows the experts are two calls.
_COMPILED: Final = {"attention": 1.0, "mlp": 2.0, "norms": 0.0, "lm_head": 0.0}
_COMPILED_NORM: Final = 6  # operators of a norm that the kernels beside it compute
_CHEAP_NORM: Final = 4  # operators of a norm that cost Python as good as nothing: no module issues them
# How often the rows of routed experts on a GPU are moved, read and written, in rows of hidden states and in those
# between the products: a forward of kernels, one of PyTorch's operators, a training step, and what LoRA adds to it.
_ROWS, _STOCK_ROWS, _TRAINED_ROWS, _LORA_ROWS = (9, 5), (24, 18), (20, 12), (4, 4)
_CHOSEN: Final = (3, 5)  # nodes of few tokens' experts that are read where they stay, of plain weights and of codes
_UNPACKED: Final = 28  # bytes that a GPU moves to unpack one byte of weights whose codes it does not multiply
_EXPERTS_AGAIN: Final = 2 / 3  # of the products of experts sent to a GPU: backward computes gate and up again
_SCORES_BACK: Final = 2.5  # of attention: scores again, and the gradients of scores, query, key and value


@dataclass(frozen=True, slots=True)
class Amounts:
    """The amounts of works in `use`, whose tokens are computed in `calls` equal parts, one after another.

    On a GPU, `torch.compile` may have made kernels of the layers' operators.
    """

    use: Use
    calls: int = 1
    compiled: bool = False

    @property
    def again(self) -> int:
        """How often forward is computed again in backward."""
        return int(self.use.trains and self.use.checkpointing)

    @property
    def passes(self) -> int:
        """How often weights are read."""
        return self.calls * (1 + self.use.trains + self.again)

    def tokens(self, work: Work) -> int:
        """Return the tokens that a work computes: after a prompt, only the last position has logits."""
        return self.use.batch if work.kind == "lm_head" and self.use.phase == "prefill" else self.use.tokens

    def flops(self, work: Work) -> float:
        """Return the FLOPs of products with frozen weights, and with LoRA's factors."""
        sent = work.experts is not None and work.packed and work.experts.sent_to(self.use.tokens) != ()
        back = (1.0 + _EXPERTS_AGAIN * sent) if self.use.trains else 0.0
        frozen = 2 * self.tokens(work) * work.products * (1 + self.again + back)
        share = work.experts.top_k / work.experts.count if work.experts else 1.0
        return frozen + 6 * self.use.tokens * work.adapter * share * self.use.trains

    def scored(self, work: Work) -> float:
        """Return the FLOPs of attention's scores and values."""
        passes = 1 + self.again + (_SCORES_BACK if self.use.trains else 0.0)
        return 2 * self.use.tokens * self._positions(work.core) * work.core.scores * passes

    def _positions(self, core: Core) -> float:
        return self.use.positions(core.window, masked=core.masked)

    def read(self, work: Work) -> float:
        """Return the bytes of weights in one pass: of routed experts, those that tokens use."""
        return work.weights * (work.experts.touched(self.use.tokens) if work.experts else 1.0)

    def unpacking(self, work: Work) -> float:
        """Return the bytes that a GPU moves to decode packed weights. Few rows are multiplied with codes in forward."""
        experts = work.experts
        if experts is None or work.decoded:
            return 0.0
        if not work.coded:
            return self.passes * _UNPACKED * self.read(work)
        weights = work.products / experts.top_k * experts.count * experts.touched(self.use.tokens)
        backward = self.calls * self.use.trains
        return (backward if self.multiplies_codes(work) else self.passes) * 4 * weights  # of bf16, written and read

    def multiplies_codes(self, work: Work) -> bool:
        """Whether experts have so few rows on average that no decoded copy of their matrices is made in forward."""
        experts = work.experts
        rows = 0 if experts is None else self.use.tokens * experts.top_k / experts.count
        return work.coded and rows <= MOST_ROWS

    def moved(self, work: Work, *, fused: bool = False) -> float:
        """Return the bytes that operators read and write beside weights: states, scores in memory, and the cache.

        With `fused` a kernel computes attention, whatever the plan says.
        """
        core, moved = work.core, self.tokens(work) * work.moved * self._moves
        if self.use.phase != "decode":
            return moved + self.use.tokens * self._positions(core) * core.pair * self._moves
        per_position = core.cached if core.fused or fused else core.cached + core.repeated + core.pair
        return moved + self.use.batch * self.use.in_cache(core.window) * per_position

    def rows(self, work: Work) -> float:
        """Return the bytes of tokens' rows that routed experts on a GPU read and write around their products."""
        experts = work.experts
        if experts is None:
            return 0.0
        moves = [_STOCK_ROWS] if not work.packed else [_TRAINED_ROWS] if self.use.trains else [_ROWS]
        moves += [_LORA_ROWS] * (work.adapter > 0)
        row = sum(hidden * experts.hidden + inner * experts.inner for hidden, inner in moves)
        return self.use.tokens * experts.top_k * row

    def copied(self, work: Work) -> float:
        """Return the bytes of the copies that PyTorch makes of each chosen expert in decoding, written and read.

        `generate` does so. Running batches of `ktc serve` have grouped products, which copy none.
        """
        experts = work.experts
        if experts is None or work.packed or self.use.phase != "decode" or self.use.batch > 1:
            return 0.0
        return 2 * self.use.tokens * experts.top_k * work.weights / experts.count

    def operators(self, work: Work) -> float:
        """Return the number of PyTorch operators, those that Python issues: backward has no Python of its own."""
        return self.calls * work.operators * self._issues

    def nodes(self, work: Work) -> float:
        """Return the nodes of a CUDA graph, which has norms and rotary positions in a kernel each."""
        experts = work.experts
        few = experts is not None and self.use.tokens <= min(SPLIT_ROWS, experts.count // experts.top_k)
        if experts is not None and experts.resident and work.packed and few:
            return self.calls * _CHOSEN[not work.decoded]
        rotations = _ROTATION * (work.kind == "attention")
        return self.calls * max(1, work.operators - _FUSED_NORM * work.norms - rotations)

    def issued(self, work: Work) -> float:
        """Return the number of PyTorch operators that Python issues for a work on a GPU."""
        experts = work.experts
        if experts is None and self.compiled:
            return self._issues * (work.operators - _COMPILED_NORM * work.norms) * _COMPILED[work.kind]
        if experts is None:
            return self.calls * (work.operators - _CHEAP_NORM * work.norms) * self._issues
        stays = len(experts.devices) < 2 and (work.decoded or (experts.resident and self.multiplies_codes(work)))
        at_once = not work.packed or (stays and not self.use.trains) or self.use.phase == "decode"
        count = _GROUPED if at_once else _ROUTED + _CHUNK * experts.chunks
        return self.calls * count * self._issues

    @property
    def _moves(self) -> float:
        return 1 + self.again + (_BACK if self.use.trains else 0.0)

    @property
    def _issues(self) -> float:
        return 1 + self.again + (_ISSUED_BACK if self.use.trains else 0.0)

    def intensity(self, work: Work) -> float:
        """Return the FLOPs per byte that is read or written."""
        nbytes = self.passes * self.read(work) + self.moved(work)
        return (self.flops(work) + self.scored(work)) / max(1.0, nbytes)
