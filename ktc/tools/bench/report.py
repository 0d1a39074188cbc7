"""The result of a run: rows, the candidates left out with reasons, and the limits of the machine, from one run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ktc.tools.bench.request import Pass


@dataclass(frozen=True, slots=True)
class Row:
    """One implementation at one number of tokens.

    `ms` is `cpu_ms` with one thread and `wall_ms` with more, medians of the rounds; `best_ms` is the quickest round:
    peers that spin suffer most from other work on the machine. `gflops` counts the products of the routed experts,
    not those of LoRA; `gbps` the weights of the experts in use in their stored format, once for each pass over them.
    `ktc_speedup`: the speed of ktc's own kernel of that format relative to this row (None for ktc's own rows).
    """

    impl: str
    passes: Pass
    shape: str
    tokens: int
    ms: float
    gflops: float
    share_of_peak: float
    gbps: float
    share_of_bandwidth: float
    isa: str
    lora_rank: int
    threads: int
    rounds: int
    cpu_ms: float
    wall_ms: float
    best_ms: float
    ktc_speedup: float | None = None

    @property
    def group(self) -> tuple[Pass, int, int]:
        """Rows of one group answer the same question and may be compared."""
        return self.passes, self.tokens, self.lora_rank

    def to_json(self) -> dict[str, Any]:
        """Return a row of `ktc bench moe --json`, where the pass is called `pass`."""
        return {"pass" if key == "passes" else key: value for key, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An implementation that was not measured in one group, and why."""

    impl: str
    passes: Pass
    tokens: int
    lora_rank: int
    reason: str

    def to_json(self) -> dict[str, Any]:
        """As a row's: the pass is called `pass`."""
        return {"pass" if key == "passes" else key: value for key, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run. `host` describes machine and versions; the limits are medians over the run."""

    host: Mapping[str, Any]
    peak_gflops: float
    read_gbps: float
    rows: tuple[Row, ...]
    left_out: tuple[LeftOut, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the object that `ktc bench moe --json` prints."""
        return {
            "host": dict(self.host),
            "peak_gflops": self.peak_gflops,
            "read_gbps": self.read_gbps,
            "rows": [row.to_json() for row in self.rows],
            "left_out": [each.to_json() for each in self.left_out],
        }


def counterpart(row: Row, rows: Iterable[Row]) -> Row | None:
    """Return ktc's own row to compare a peer's with: of the same format, and of the first instruction set.

    Peers without a format in their name compute in bf16; without ktc's bf16, its first format is used.
    """
    ours = [each for each in rows if each.group == row.group and each.impl.startswith("ktc_")]
    _, _, suffix = row.impl.partition("kt_kernel_")
    of_format = [each for each in ours if each.impl == f"ktc_{suffix or 'bf16'}"]
    return next(iter(of_format if suffix else of_format or ours), None)
