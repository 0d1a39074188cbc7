"""The passes of a step: its sizes, the decision whether and how its micro-batches are stacked, and how they are split.

In: the tokens of the micro-batches and the memory of a pass. Out: the way that keeps least in host memory among those
with the fewest passes. `stack_size` counts the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ktc.training.trainers.layer_calls import ModelCall
from ktc.training.trainers.layer_pass import NOTHING_KEPT, Kept, Offloaded
from ktc.training.trainers.several_lengths import padded_length, pads_little
from ktc.training.trainers.split_layer import SplitLayer
from ktc.training.trainers.stack_size import (
    CHUNKS,
    bytes_per_token,
    expert_bytes,
    fitting_chunk,
    fitting_tokens,
    kept_bytes_per_token,
    kept_factor_bytes,
    kept_layers,
    room,
    working_bytes,
)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The tokens of each micro-batch of a step, and the longest sequence among them.

    Of several processes that run passes together, those of the process with most.
    """

    tokens: tuple[int, ...]
    length: int
    undivided: int = 0  # the tokens of the largest micro-batch, where it cannot be divided into its sequences
    rows: tuple[int, ...] = ()  # of each micro-batch; none: one
    changes: int = 0  # how often the trainer's code was replaced before the step

    @property
    def largest(self) -> int:
        """The tokens of the largest micro-batch."""
        return max(self.tokens)

    @property
    def whole(self) -> int:
        """The tokens of the step."""
        return sum(self.tokens)

    @property
    def padded(self) -> int:
        """The most tokens of the step where its micro-batches are padded to one length."""
        longest = padded_length(self.lengths)
        return max(rows * longest for rows, _ in self._shapes) * len(self.tokens)

    @property
    def lengths(self) -> list[int]:
        """The length of each micro-batch."""
        return [length for _, length in self._shapes]

    @property
    def _shapes(self) -> list[tuple[int, int]]:
        """The rows and the length of each micro-batch."""
        rows = self.rows or (1,) * len(self.tokens)
        return [(count, -(-tokens // count)) for count, tokens in zip(rows, self.tokens, strict=True)]

    def with_padding(self, tokens: int) -> StepSizes:
        """Return the sizes of the step with its padding on a GPU, in batches of at most `tokens` tokens.

        The batches are those of `joined_inputs.joined`: neighbours by length with equally many rows.
        """
        runs: list[list[tuple[int, int]]] = []
        for rows, length in sorted(self._shapes, key=lambda shape: shape[1]):
            run = runs[-1] if runs else []
            lengths = [*(of_one for _, of_one in run), length]
            if run and run[0][0] == rows and pads_little(lengths, tokens, rows):
                run.append((rows, length))
            else:
                runs.append([(rows, length)])
        padded = [(rows, padded_length([length for _, length in run])) for run in runs for rows, _ in run]
        return replace(
            self,
            tokens=tuple(rows * length for rows, length in padded),
            length=max(self.length, *(length for _, length in padded)),
            rows=tuple(rows for rows, _ in padded),
        )


@dataclass(frozen=True, slots=True)
class Stacking:
    """Whether micro-batches share passes over the experts, why, and the most tokens of one pass (0 if they do not).

    `bytes_per_token` are the bytes on each device that a token of a pass needs until its backward. Attention runs
    `chunk_tokens` at a time.
    """

    on: bool
    reason: str
    tokens: int
    chunk_tokens: int = CHUNKS[0]
    bytes_per_token: tuple[tuple[str, int], ...] = ()
    offloaded: Offloaded = Offloaded.NOTHING  # what waits for backward in host memory
    kept: Kept = NOTHING_KEPT  # what waits for backward on the GPU beside the states of layers
    padded: bool = False  # whether micro-batches of several lengths go through the layers as one batch with padding
    scarce: str = ""  # the device whose memory is the first that a longer pass would fill
    whole_loss: str = ""  # why the loss of a micro-batch is not computed in ktc's chunks of tokens; "" if it is
    not_compiled: str = ""  # the layers on a GPU that are not compiled, and why
    one_by_one: str = ""  # why the code around the layers runs for each micro-batch; "" if it runs for a chunk of them
    joins_some: bool = False  # whether that holds for some micro-batches of the step before, and not for others
    told_of_rows: str = ""  # whether micro-batches of more tokens than a pass are divided into their rows
    graphs: str = ""  # whether layers that keep everything for backward are replayed, and why not

    def __str__(self) -> str:
        if not self.on:
            return f"one by one: {self.reason}"
        loss = f"; the loss is not computed in ktc's chunks: {self.whole_loss}" if self.whole_loss else ""
        sizes = f"up to {self.tokens:,} tokens in one pass, {self.chunk_tokens:,} in a chunk of attention"
        layers = f"; {self.not_compiled}" if self.not_compiled else ""
        once = "alone for some micro-batches" if self.joins_some else "once per micro-batch"
        around = f"; the model's code around its layers runs {once}: {self.one_by_one}" if self.one_by_one else ""
        rows = f"; {self.told_of_rows}" if self.told_of_rows else ""
        waiting = f"; {self.offloaded.told}" if self.offloaded else ""
        kept = f"; {self.kept.told}" if self.kept.told else ""
        graphs = f"; {self.graphs}" if self.graphs else ""
        padded = "; layers pad micro-batches of several lengths, and experts compute no padding" if self.padded else ""
        return f"stacked, {sizes}: {self.reason}{waiting}{kept}{graphs}{padded}{loss}{layers}{around}{rows}"

    def without_sizes(self) -> Stacking:
        """Return what is news of a decision: other sizes are not."""
        return replace(
            self, reason="", tokens=0, chunk_tokens=0, bytes_per_token=(), offloaded=Offloaded.NOTHING,
            kept=NOTHING_KEPT, padded=False, scarce="",
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PassMemory:
    """The free bytes of each device, those of them that the loss needs, and the bytes of a trained pair."""

    free: Mapping[str, int]
    loss: int
    pair: int


def with_padding(
    layers: Sequence[SplitLayer], call: ModelCall, sizes: StepSizes, memory: PassMemory, chunk_tokens: int | None
) -> Stacking:
    """Return what `fewest_passes` does, with layers that pad micro-batches where the step is one pass with padding.

    Then more may wait in host memory: the bus needs less time for that than Python for each length.
    """
    more = sizes.with_padding(chunk_tokens or CHUNKS[-1])
    if sum(more.tokens) > sizes.whole:
        longest = call.hidden.new_empty((*call.hidden.shape[:1], more.length, call.hidden.shape[-1]), device="meta")
        padded = fewest_passes(layers, replace(call, hidden=longest), more, memory, chunk_tokens)
        if padded.tokens >= more.whole:
            return replace(padded, padded=True)
    return fewest_passes(layers, call, sizes, memory, chunk_tokens)


def fewest_passes(
    layers: Sequence[SplitLayer], call: ModelCall, sizes: StepSizes, memory: PassMemory, chunk_tokens: int | None
) -> Stacking:
    """Return the way that keeps least in host memory among those with the fewest passes.

    Without `chunk_tokens` those that fit the memory are chosen.
    """
    ways: list[Stacking] = []
    for way in Offloaded:
        ways.append(_with_offloaded(way, layers, call, sizes, memory, chunk_tokens))
        if ways[-1].tokens >= sizes.whole:
            return ways[-1]
    return min(ways, key=lambda size: (-(-sizes.whole // max(1, size.tokens)), size.offloaded))


def _with_offloaded(
    offloaded: Offloaded,
    layers: Sequence[SplitLayer],
    call: ModelCall,
    sizes: StepSizes,
    memory: PassMemory,
    chunk_tokens: int | None,
) -> Stacking:
    """Return the tokens that fit one pass with this much in host memory, and where memory is scarce."""
    free = memory.free
    per_token = bytes_per_token(layers, call, offloaded)
    of_experts = expert_bytes(layers)
    chunk = chunk_tokens or fitting_chunk(call, per_token, free, memory.loss, sizes.whole, of_experts, memory.pair)
    at_once = max(min(chunk, sizes.whole), sizes.length, sizes.undivided)
    working = working_bytes(call, at_once, memory.loss, of_experts, memory.pair)
    fits = fitting_tokens(per_token, working, free)
    scarce = min(fits, key=lambda device: fits[device])
    kept = kept_bytes_per_token(layers, call)
    with_kept = {device: size + kept.get(device, 0) for device, size in per_token.items()}
    factors = kept_factor_bytes(layers, call)
    beside = {device: working.get(device, 0) + factors.get(device, 0) for device in {*working, *factors}}
    left = room(with_kept, beside, free, sizes.whole)
    results = bool(kept) and fits[scarce] >= sizes.whole and min(left[device] for device in with_kept) >= 0
    parts = kept_layers(layers, call, sizes.whole, left) if results and not offloaded else 0
    apart = {device: size - of_experts.get(device, 0) - memory.loss for device, size in left.items()}
    replays = 0 < parts == kept_layers(layers, call, sizes.whole, apart) == len(layers)
    reason = "a step's micro-batches fit the free memory"
    return Stacking(
        True, reason, fits[scarce], chunk, tuple(sorted(per_token.items())), offloaded=offloaded, scarce=scarce,
        kept=Kept(results, parts, replays),
    )  # fmt: skip


def passes(sizes: Sequence[int], limit: int) -> Iterator[tuple[int, int]]:
    """Split micro-batches, `sizes` in tokens, into runs of at most `limit` tokens or one micro-batch.

    Returns:
        The index of each run's first micro-batch, and the index after its last.
    """
    first, tokens = 0, 0
    for index, size in enumerate(sizes):
        if index > first and tokens + size > limit:
            yield first, index
            first, tokens = index, 0
        tokens += size
    yield first, len(sizes)
