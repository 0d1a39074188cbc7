"""Metrics in the text format of Prometheus: what was asked and answered, how fast, and what runs now."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Final, Literal

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from torch import nn

from ktc.inference.serving.engine import Engine
from ktc.model.experts.kept.kept_experts import KeptExperts
from ktc.model.loading.kept import kept_stores

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_FIRST: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_NEXT: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Metrics:
    """The registry of one server."""

    def __init__(self) -> None:
        self._registry = of = CollectorRegistry()
        ProcessCollector(registry=of)
        self.requests = Counter("ktc_requests", "Requests by how they ended", ["model", "outcome"], registry=of)
        self.prompt_tokens = Counter("ktc_prompt_tokens", "Tokens of prompts", ["model"], registry=of)
        self.new_tokens = Counter("ktc_generated_tokens", "Tokens of answers", ["model"], registry=of)
        self.first = Histogram(
            "ktc_time_to_first_token_seconds", "From a request to its first token", buckets=_FIRST, registry=of
        )
        self.next = Histogram(
            "ktc_time_per_token_seconds", "Between two tokens of an answer", buckets=_NEXT, registry=of
        )
        self.updates = Counter("ktc_updates", "Updates of weights and adapters", ["kind", "outcome"], registry=of)
        self._running = Gauge("ktc_requests_running", "Requests in running batches", registry=of)
        self._waiting = Gauge("ktc_requests_waiting", "Requests whose prompts are not read yet", registry=of)
        self._prefix_tokens = Gauge("ktc_cached_prompt_tokens", "Tokens of prompts that were cached", registry=of)
        self._prefix_bytes = Gauge("ktc_prefix_cache_bytes", "Keys and values kept for prompts", registry=of)
        self._cache = Gauge("ktc_cache_bytes", "Keys and values of running requests", registry=of)

    def watch(self, engine: Engine) -> None:
        """Read the gauges from `engine`."""
        self._running.set_function(lambda: engine.num_running)
        self._waiting.set_function(lambda: engine.num_waiting)
        self._prefix_tokens.set_function(lambda: engine.num_cached_tokens)
        self._prefix_bytes.set_function(lambda: engine.prefix_bytes)
        self._cache.set_function(lambda: engine.cache_bytes)

    def watch_experts(self, model: nn.Module) -> None:
        """Read the gauges of a model whose steps split experts between a GPU and the CPU."""
        stores = kept_stores(model)
        if not stores:
            return
        experts = Gauge(
            "ktc_experts_read", "Experts that decoding steps have read", ["engine"], registry=self._registry
        )
        nbytes = Gauge("ktc_expert_bytes_read", "Bytes of these experts", ["engine"], registry=self._registry)
        for engine in ("gpu", "bus", "cpu"):
            experts.labels(engine).set_function(partial(_read_by, stores, engine, "experts"))
            nbytes.labels(engine).set_function(partial(_read_by, stores, engine, "nbytes"))

    def text(self) -> bytes:
        """Return all metrics."""
        return generate_latest(self._registry)

    def started(self, model: str, prompt_tokens: int) -> RequestClock:
        """Return the clock of a new request."""
        return RequestClock(self, model, prompt_tokens)


def _read_by(stores: Sequence[KeptExperts], engine: str, what: Literal["experts", "nbytes"]) -> float:
    return float(sum(getattr(store.figures(), what)[engine] for store in stores))


class RequestClock:
    """The times of one request."""

    def __init__(self, metrics: Metrics, model: str, prompt_tokens: int) -> None:
        self._metrics, self._model, self._prompt_tokens = metrics, model, prompt_tokens
        self._last, self._begun = time.perf_counter(), False

    def tokens(self, num: int) -> None:
        """Count new tokens."""
        if not num:
            return
        now, metrics = time.perf_counter(), self._metrics
        (metrics.next if self._begun else metrics.first).observe(now - self._last)
        if not self._begun:
            metrics.prompt_tokens.labels(self._model).inc(self._prompt_tokens)
        self._last, self._begun = now, True
        metrics.new_tokens.labels(self._model).inc(num)

    def ended(self, outcome: str) -> None:
        """Count the request."""
        self._metrics.requests.labels(self._model, outcome).inc()
