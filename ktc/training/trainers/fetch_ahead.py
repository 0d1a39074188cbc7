"""Fetch the micro-batches of the next step while a GPU computes this one.

In: the iterator of a trainer's epoch. Out: the same batches in the same order. A step ends by a wait for the GPU, and
16 rows that are collated one by one take Python 20 ms, in which the GPU would idle. `fetch` precedes that wait.
Nothing is fetched ahead where that could be noticed. Batches that draw random numbers have their state in checkpoints.
Callbacks that are not of known libraries may change the data between two steps. Data without a length may have to be
waited for. Some loaders have a state, or get their batches from another process, which may be waiting for this one.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, cast

import numpy as np
import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch import Tensor
from torch.utils.data import IterableDataset

from ktc.training.trainers.known_columns import count_columns
from ktc.training.trainers.private_api import pytree

_KNOWN: Final = frozenset({"transformers", "trl", "peft", "ktc"})


def has_known_callbacks(trainer: Any) -> bool:
    """Return whether all callbacks are of known libraries, which read no gradients and change no data."""
    return {type(callback).__module__.partition(".")[0] for callback in trainer.callback_handler.callbacks} <= _KNOWN


class FetchAhead:
    """The batches of one trainer that are fetched before its next step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._epoch: _Epoch | None = None
        self._count = 0  # the batches of a step
        self._steps = 0  # of the epoch
        self._stream: torch.cuda.Stream | None = None

    def iterator(self, epoch_iterator: Iterator[Any], count: int) -> Iterator[Any]:
        """Return an iterator over the same batches, first those that were fetched ahead, for a step of `count`."""
        if self._epoch is None or self._epoch.source is not epoch_iterator:
            self._epoch, self._steps = _Epoch(epoch_iterator), 0
        self._count = count
        self._steps += 1
        # the first batch of an epoch draws its order
        self._epoch.watched = self._steps > 1 and self._trainer.args.device.type in _DEVICES
        return self._epoch

    def fetch(self, device: torch.device) -> None:
        """Fetch the batches of the next step, if nothing can notice, while `device` computes this one."""
        epoch = self._epoch
        if epoch is None or self._steps < 2 or epoch.drew or device.type not in _DEVICES or not self._is_unnoticed():
            return
        with self._beside(device):
            epoch.fetch(self._count)
            count_columns(epoch.batches)
        if device.type == "cuda":
            current = torch.cuda.current_stream(device)
            current.wait_stream(cast("torch.cuda.Stream", self._stream))
            for tensor in epoch.tensors():
                if tensor.is_cuda:
                    tensor.record_stream(current)

    def _beside(self, device: torch.device) -> AbstractContextManager[Any]:
        """Copy to the device beside its work: a copy of the loader waits for the stream that it is on."""
        if device.type != "cuda":
            return nullcontext()
        self._stream = self._stream or torch.cuda.Stream(device)
        return torch.cuda.stream(self._stream)

    def _is_unnoticed(self) -> bool:
        trainer = self._trainer
        state, config = trainer.state, trainer.args.accelerator_config
        kinds = "use_stateful_dataloader", "dispatch_batches"
        if state.global_step + 1 >= state.max_steps or any(getattr(config, kind, None) for kind in kinds):
            return False
        return hasattr(trainer.train_dataset, "__len__") and has_known_callbacks(trainer) and not self._is_dispatched()

    def _is_dispatched(self) -> bool:
        """Return whether one process may fetch the batches of all: without a setting that depends on the data."""
        trainer = self._trainer
        loader = getattr(trainer.callback_handler, "train_dataloader", None)
        several = getattr(trainer.args, "world_size", 1) > 1
        return isinstance(loader, DataLoaderDispatcher) or (
            several and isinstance(trainer.train_dataset, IterableDataset)
        )


_DEVICES: Final = {"cuda"}  # that compute while Python fetches


class _Epoch(Iterator[Any]):
    """The batches of an epoch. `drew` says whether a batch drew random numbers while it was `watched`."""

    def __init__(self, source: Iterator[Any]) -> None:
        self.source = source
        self.watched = self.drew = False
        self._fetched = deque[Any]()
        self._ended: BaseException | None = None  # raised behind the batches that were fetched

    def __next__(self) -> Any:
        if self._fetched:
            return self._fetched.popleft()
        if self._ended is not None:
            ended, self._ended = self._ended, None
            raise ended
        return self._next()

    def fetch(self, count: int) -> None:
        """Fetch until `count` batches are there, or none is left."""
        while len(self._fetched) < count and self._ended is None:
            try:
                self._fetched.append(self._next())
            except Exception as ended:  # noqa: BLE001  # StopIteration too: raised in the step that takes the batch
                self._ended = ended

    @property
    def batches(self) -> Sequence[Any]:
        """The batches that were fetched."""
        return self._fetched

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the batches that were fetched."""
        return list(_tensors(self._fetched))

    def _next(self) -> Any:
        if not self.watched or self.drew:
            return next(self.source)
        before = _random_states()
        batch = next(self.source)
        self.drew = _random_states() != before
        return batch


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(list(values)):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):  # a `BatchEncoding` is one leaf
            yield from _tensors(cast("Mapping[Any, Any]", leaf).values())


def _random_states() -> tuple[bytes, Any, Any]:
    kind, keys, *rest = cast("tuple[Any, ...]", np.random.get_state())  # that of code that uses it
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), (kind, keys.tobytes(), *rest)
