"""The values of a prediction: a use of the model, its work in numbers, and the time that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from ktc.model.experts.kept.kept_division import Division, even_over_bus

Phase = Literal["train", "prefill", "decode"]
PHASES: tuple[Phase, ...] = ("train", "prefill", "decode")
SPLIT_ROWS: Final = 16  # of a step whose experts are on three engines
KINDS = ("attention", "experts", "mlp", "norms", "lm_head", "optimizer")


@dataclass(frozen=True, slots=True)
class Use:
    """One call of the model: `batch` sequences of `length` tokens, which decoding has behind it and a step adds one to.

    `checkpointing` computes a layer's forward again in backward.
    """

    phase: Phase
    batch: int
    length: int
    checkpointing: bool = False

    @property
    def tokens(self) -> int:
        """The tokens that one call computes."""
        return self.batch if self.phase == "decode" else self.batch * self.length

    def positions(self, window: int = 0, *, masked: bool = False) -> float:
        """Return the positions whose scores a token computes, on average; `masked`: also those that it does not see.

        A `window` of 0 is unlimited. PyTorch computes a window by a mask, so that all pairs have scores.
        """
        if self.phase == "decode":
            return float(self.in_cache(window))
        return float(self.length) if masked or 0 < window < self.length else (self.length + 1) / 2

    def in_cache(self, window: int) -> int:
        """Return the positions of a sequence that a layer's cache holds."""
        return min(self.length, window) if window else self.length

    @property
    def trains(self) -> bool:
        """Whether a call goes back too."""
        return self.phase == "train"

    def __str__(self) -> str:
        if self.phase == "decode":
            return f"decode, batch {self.batch}, context {self.length:,}"
        return f"{self.phase}, {self.batch} x {self.length:,} tokens" + ", checkpointing" * self.checkpointing


@dataclass(frozen=True, slots=True)
class RoutedExperts:
    """The routed experts of a layer: their number, how many a token uses, and where calls of many tokens go.

    `devices` compute calls of at least `least` tokens, from weights that are `resident` there or cross the bus, each
    its share in `chunks`. Their adapters are updated on `adapters_on`, "" for the device of the work.
    In decoding steps that are CUDA graphs, the first device reads the part `kept` of the experts from its memory and,
    by `bus_share`, some of the others over the bus; None: it reads none in them. With `fixed` the share alone decides.
    So it does by `division` in calls of more rows, which are not sent. In a step one expert of `parts` parts is divided
    by them. A row of hidden states has `hidden` bytes, one between the products `inner`.
    """

    count: int
    top_k: int
    devices: tuple[str, ...] = ()
    least: int = 0
    resident: bool = False
    chunks: int = 1
    adapters_on: str = ""
    kept: float = 0.0
    bus_share: float | None = None
    fixed: bool = False
    hidden: int = 0
    inner: int = 0
    division: Division | None = None
    parts: int = 1

    def touched(self, tokens: int) -> float:
        """Return the share of experts that `tokens` tokens use, where every expert is as likely."""
        return 1 - (1 - self.top_k / self.count) ** tokens

    def engines(self, use: Use, lead: float = 0.0) -> tuple[float, float, float] | None:
        """Return how many experts of a step a GPU's memory, the bus and the CPU read; None where one engine does.

        The bus reads whole experts of those that are not kept, and the first parts of one, by `kept_split.over_bus`.
        """
        if self.bus_share is None or use.trains or self.sent_to(use.tokens):
            return None
        chosen = self.count * self.touched(use.tokens)
        misses = chosen * (1 - self.kept)
        if self.division is not None and self.is_divided(use):
            sent = even_over_bus(misses, self.rows(use.tokens), self.bus_share, self.division)
            return chosen - misses, sent, misses - sent
        if use.phase != "decode" or use.tokens > SPLIT_ROWS:
            return None
        fewer = int(misses)
        below, above = (self._over_bus(number, self.bus_share, lead) for number in (fewer, fewer + 1))
        sent = below + (misses - fewer) * (above - below)
        return chosen - misses, sent, misses - sent

    def _over_bus(self, misses: int, share: float, lead: float) -> float:
        parts = misses * self.parts
        return min(parts, int((parts + 1) * share + lead * self.parts)) / self.parts

    def is_divided(self, use: Use) -> bool:
        """Whether the experts of a prompt, which are not sent, are divided. Steps with as many rows are the CPU's."""
        return self.division is not None and use.phase == "prefill" and use.tokens >= self.division.least

    def rows(self, tokens: int) -> float:
        """Return the rows of each expert that `tokens` tokens use."""
        return tokens * self.top_k / (self.count * self.touched(tokens))

    def crowding(self, tokens: int) -> float:
        """Return the time of an expert of a divided call on the CPU, in that of reading it."""
        return 1.0 if self.division is None else self.division.cost(self.rows(tokens))

    def sent_to(self, tokens: int) -> tuple[str, ...]:
        """Return the devices of a call, empty where the CPU computes it."""
        return self.devices if tokens >= self.least else ()


@dataclass(frozen=True, slots=True)
class Core:
    """The core of attention. `scores` are multiply-adds per token and position; a `window` of 0 is unlimited.

    `latent` has values narrower than keys. `cached` are bytes of a position in the cache, and `repeated` those that
    PyTorch moves beside them in decoding, for heads that share keys. Operators that keep all scores in memory, as with
    sinks, move `pair` bytes for a token and position; others keep none. With `fused` a kernel computes decoding.
    """

    scores: float = 0.0
    latent: bool = False
    cached: float = 0.0
    repeated: float = 0.0
    pair: float = 0.0
    window: int = 0
    fused: bool = False

    @property
    def masked(self) -> bool:
        """Whether a token computes the scores of positions that it does not see."""
        return self.pair > 0


NO_CORE: Final = Core()


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of module in a layer (None: outside the layers), in numbers that no use changes.

    `products` are multiply-adds per token with frozen weights, and `weights` the bytes of these as stored, of which
    `streamed` cross the bus in every pass. `adapter` has the parameters of LoRA, `adapters` the number of its tensors.
    `hidden` are the bytes of a token's hidden state, `moved` those per token that operators read and write, and
    `operators` how many there are, with those of `norms` RMS norms. `packed` weights are in the kernel's layout. A GPU
    has `decoded` them for all calls, multiplies them as they are `coded`, or decodes them in each call. Weights that
    are `scattered` are not cut for the NUMA nodes of the machine.
    `core` is attention without its projections.
    """

    kind: str
    layer: int | None
    device: str
    weight_format: str
    products: float = 0.0
    weights: float = 0.0
    streamed: float = 0.0
    adapter: int = 0
    adapters: int = 0
    hidden: int = 0
    moved: float = 0.0
    operators: int = 0
    norms: int = 0
    core: Core = NO_CORE
    experts: RoutedExperts | None = None
    packed: bool = False
    decoded: bool = False
    coded: bool = False
    scattered: bool = False


@dataclass(frozen=True, slots=True)
class Prediction:
    """The time of one call. `kinds` has seconds by kind of module, `engines` the busy seconds of each engine.

    `crossings` are the seconds of hidden states between devices. The engine that `binds` has the least idle time.
    `traffic` are bytes between two devices, `cpu` for the host's memory, in both directions.
    """

    use: Use
    seconds: float
    kinds: Mapping[str, float]
    engines: Mapping[str, float]
    crossings: float
    binds: str
    traffic: Mapping[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])

    @property
    def tokens_per_second(self) -> float:
        """The tokens of the call in a second."""
        return self.use.tokens / self.seconds
