"""`ktc bench attention`: attention of one new token over caches on a GPU, by ktc's kernels and by PyTorch.

In: models whose sizes are known, numbers of sequences and contexts. Out: the time of a layer in a CUDA graph of
several, each with a cache of its own that comes from memory. Its share is that of the cache's bytes in the bandwidth of
copies in the same run. Both read a cache with the capacity, and the mask, that a captured step has. Refused: a machine
without a GPU (H244).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor
from transformers.integrations import sdpa_attention

from ktc.diagnostics import Diagnostic, HostLacks
from ktc.model.attention.decode import KVCacheView
from ktc.model.attention.latent import attend, latent_scores
from ktc.model.attention.split_decode import SplitDecode, has_kernels, relative_error
from ktc.model.decode_steps.step_memory import capacity_for
from ktc.tools.bench.layer_requests import Attention
from ktc.tools.bench.progress import ProgressSink
from ktc.tools.bench.report import Report, column, table_of
from ktc.tools.measure.figures import seconds, wait
from ktc.tools.measure.gpu import bandwidth

if TYPE_CHECKING:
    from rich.table import Table

Call = Callable[[], Tensor]
_MOST_BYTES: Final = 4 << 30  # of the caches of one row
_LONG: Final = 0.02  # seconds of the replays of a round
_CPU_COPY: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Layers, query heads, key heads, and the widths of keys, of rotary keys and of values; 0: latents are values."""

    layers: int
    heads: int
    key_heads: int
    key: int
    rope: int
    value: int


SIZES: Final = {
    "v2lite": CacheSizes(27, 16, 1, 512, 64, 0),
    "qwen3_30b": CacheSizes(48, 32, 4, 128, 0, 128),
    "v3": CacheSizes(61, 128, 1, 512, 64, 0),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One layer. Medians of microseconds; `difference` is relative, of the outputs of both."""

    model: str = column("model", left=True)
    batch: int = column("sequences", "{:,}")
    context: int = column("context", "{:,}")
    cache_mb: float = column("cache MB", "{:.1f}")
    ktc_us: float = column("ktc us", "{:.1f}")
    share: float = column("of the bandwidth", "{:.2f}")
    torch_us: float = column("PyTorch us", "{:.1f}")
    faster: float = column("times as fast", "{:.1f}x")
    difference: float = column("difference", "{:.1e}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionReport(Report):
    """`gbps` is of copies, which read and write."""

    device: str
    gbps: float
    rows: tuple[Row, ...]

    def shown(self) -> Iterator[str | Table]:
        """Yield the device and the rows."""
        yield f"one token of a layer in a CUDA graph, on {self.device}: copies have {self.gbps:,.0f} GB/s"
        yield table_of(self.rows, section=lambda row: row.model)


def run(request: Attention, sink: ProgressSink) -> AttentionReport:
    """Measure on the first GPU. Raises HostLacks without one (H244), or without Triton (H244)."""
    device = torch.device("cuda:0")
    if torch.cuda.device_count() == 0 or not has_kernels(device):
        message = "attention on a GPU cannot be measured: this process sees none that ktc's kernels run on"
        raise HostLacks(Diagnostic("H244", message, hint="`benchmarks/decode_attention.py` measures the CPU's"))
    return run_on(device, request, sink)


def run_on(device: torch.device, request: Attention, sink: ProgressSink) -> AttentionReport:
    """Measure each model, number of sequences and context."""
    cases = [(model, batch, context) for model in request.models for batch in request.batches
             for context in request.contexts]  # fmt: skip
    gbps = (bandwidth(device) if device.type == "cuda" else bandwidth(device, _CPU_COPY)).median / 1e9
    rows = list[Row]()
    for place, (model, batch, context) in enumerate(cases):
        sink.progress(f"{model}, {batch} x {context:,}", place, len(cases))
        rows.append(_measured(device, model, batch, context, gbps, request.rounds))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return AttentionReport(device=name, gbps=gbps, rows=tuple(rows))


def _measured(device: torch.device, model: str, batch: int, context: int, gbps: float, rounds: int) -> Row:
    """Return the row of one case."""
    sizes, capacity = SIZES[model], capacity_for(context + 1)
    row_bytes = 2 * sizes.key_heads * (sizes.key + sizes.rope + sizes.value)
    layers = max(2, min(sizes.layers, _MOST_BYTES // (batch * capacity * row_bytes))) if device.type == "cuda" else 1
    mask = (torch.arange(capacity, device=device) < context).expand(batch, 1, 1, capacity).contiguous()
    query = torch.randn(batch, sizes.heads, 1, sizes.key + sizes.rope, device=device).bfloat16()
    caches = [_cache(device, sizes, batch, capacity) for _ in range(layers)]
    scale, split = float(query.shape[-1]) ** -0.5, SplitDecode(device.type)

    def ours(kv: KVCacheView) -> Tensor:
        return split(query, kv, scale=scale, mask=mask)

    def stock(kv: KVCacheView) -> Tensor:
        return _stock(query, kv, scale, mask)

    with torch.no_grad():
        computed, expected = ours(caches[0]).float(), stock(caches[0]).float()
        calls = [_repeated(device, lambda by=by: [by(kv) for kv in caches]) for by in (ours, stock)]
        times = [[call() / layers for call in calls] for _ in range(rounds)]
    ktc, by_torch = (statistics.median(times[at][number] for at in range(rounds)) for number in (0, 1))
    nbytes = batch * context * row_bytes
    return Row(
        model, batch, context, nbytes / 1e6, ktc * 1e6, nbytes / ktc / 1e9 / gbps, by_torch * 1e6, by_torch / ktc,
        relative_error(computed, expected),
    )  # fmt: skip


def _cache(device: torch.device, sizes: CacheSizes, batch: int, capacity: int) -> KVCacheView:
    keys, rope, values = (
        torch.randn(batch, sizes.key_heads, capacity, width, device=device, dtype=torch.bfloat16) if width else None
        for width in (sizes.key, sizes.rope, sizes.value)
    )
    assert keys is not None, "every model has keys"
    return KVCacheView(keys, keys if values is None else values, rope)


class _Absorbed:
    """The up-projection of queries that are absorbed already, to compare what reads the cache."""

    def parts(self, query: Tensor) -> tuple[Tensor, Tensor]:
        return query[..., :512], query[..., 512:]

    def out_of_latent(self, summed: Tensor) -> Tensor:
        return summed


def _stock(query: Tensor, kv: KVCacheView, scale: float, mask: Tensor) -> Tensor:
    """Return attention by PyTorch: transformers' function of grouped queries, absorbed latents by their products."""
    if kv.rope_keys is None:
        module: Any = SimpleNamespace(num_key_value_groups=query.shape[1] // kv.keys.shape[1], is_causal=True)
        sdpa = cast("Any", sdpa_attention).sdpa_attention_forward
        return sdpa(module, query, kv.keys, kv.values, mask, scaling=scale)[0]
    up = cast("Any", _Absorbed())
    latent = kv.keys[:, 0]
    return attend(latent_scores(query, latent, kv.rope_keys[:, 0], up, scale=scale), latent, up, mask=mask)[0]


def _repeated(device: torch.device, call: Callable[[], object]) -> Callable[[], float]:
    """Return a function that measures the seconds of a call: of a GPU by replays of its graph, between two events."""
    call()
    if device.type != "cuda":
        return lambda: seconds(device, call)
    wait(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
        call()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replays(count: int) -> float:
        first.record()
        for _ in range(count):
            graph.replay()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3 / count

    count = max(1, int(_LONG / replays(2)))
    return lambda: replays(count)
