"""The random numbers of a part of a layer: states of generators that are taken, compared and restored."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RandomState:
    """The states of two generators: the host's and, for code that runs on a GPU, that GPU's."""

    host: Tensor
    gpu: tuple[torch.device, Tensor] | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """Return the state for code on `device`; while a CUDA graph is captured, which draws nothing, the host's."""
        has_gpu = device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
        gpu = (device, torch.cuda.get_rng_state(device)) if has_gpu else None
        return cls(torch.get_rng_state(), gpu)

    def restore(self) -> None:
        """Set the generators back."""
        torch.set_rng_state(self.host)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu[1], self.gpu[0])

    @contextmanager
    def again(self) -> Generator[None]:
        """Draw the numbers after this state inside the context; what is drawn outside does not depend on it."""
        now = RandomState.now(torch.device("cpu") if self.gpu is None else self.gpu[0])
        self.restore()
        try:
            yield
        finally:
            now.restore()

    def equals(self, other: RandomState) -> bool:
        """Return whether no number was drawn between both states of one device."""
        same = torch.equal(self.host, other.host)
        return same and (self.gpu is None or other.gpu is None or torch.equal(self.gpu[1], other.gpu[1]))


def states_of_all() -> tuple[RandomState, ...]:
    """Return the states of the host's generator and of every GPU's that this process uses."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return (RandomState.now(torch.device("cpu")), *(RandomState.now(torch.device("cuda", gpu)) for gpu in gpus))
