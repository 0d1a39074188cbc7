"""Work beside the stream of a model: the model's next operations run at the same time, until one needs the result.

In: work whose result is one tensor. Out: the tensor at once, and the model's stream waits for the work before the first
operation that reads or writes it. A view of it waits for nothing. So a block that adds shared experts to routed ones
computes both at the same time.
A module waits for each of its positional inputs, since a kernel that it launches itself is not an operation of PyTorch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ktc.model.experts.private_api import TorchDispatchMode, tree_iter

Work = Callable[[], object]
_VIEWS: Final = frozenset({
    "alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split", "split_with_sizes", "squeeze",
    "t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view",
})  # fmt: skip
"""Operations that read no values. `reshape` is none of them: it may copy."""


class StreamOrder(Protocol):
    """A second order of work on a device."""

    def start(self, device: torch.device, work: Work) -> None:
        """Begin `work` after everything that the model has enqueued on `device`."""
        ...

    def join(self, device: torch.device) -> None:
        """Let the next operations of the model on `device` wait for all work that was started."""
        ...


class SideStream:
    """A stream of each GPU beside the current one, which may be captured: the graph then has two branches.

    On another device work is done when it starts.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def start(self, device: torch.device, work: Work) -> None:
        """See `StreamOrder.start`."""
        if device.type != "cuda":
            work()
            return
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        side = self._streams[device]
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            work()

    def join(self, device: torch.device) -> None:
        """See `StreamOrder.join`."""
        if device in self._streams:
            torch.cuda.current_stream(device).wait_stream(self._streams[device])


class Beside(TorchDispatchMode):
    """Work that was started within the context `entered`, at most one at a time."""

    def __init__(self, order: StreamOrder) -> None:
        super().__init__()
        self._order = order
        self._pending: Tensor | None = None  # held, so that no other tensor takes its memory
        self._after: Work | None = None  # of the model's stream, once it has waited
        self._thread = 0  # that entered

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled functions run as they are; otherwise `torch.compile` would never compile them again."""
        return True

    @contextmanager
    def entered(self) -> Generator[None]:
        """Watch the operations of this thread in the context. At its end all work is joined, after an error too."""
        self._thread = threading.get_ident()
        hook = register_module_forward_pre_hook(self._before_module)
        try:
            with self:
                yield
            self.join()
        except BaseException:
            with suppress(RuntimeError):  # of a capture that the error has ended: the error itself is reported
                self.join()
            raise
        finally:
            hook.remove()

    def start(self, out: Tensor, work: Work) -> None:
        """Start `work`, which writes `out`. Work that was started before is joined."""
        self.join()
        try:
            self._order.start(out.device, work)
        finally:
            self._pending = out  # not before: the work itself writes it. After an error too: a part may be under way

    def then(self, work: Work) -> None:
        """Do `work` in the model's stream as soon as that has waited for what was started."""
        assert self._pending is not None, "work was started"
        self._after = work

    def join(self) -> None:
        """Let the model's stream wait for the work that was started."""
        if (pending := self._pending) is not None:
            after, self._pending, self._after = self._after, None, None
            self._order.join(pending.device)
            if after is not None:
                after()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.__name__.partition(".")[0] not in _VIEWS:
            self._join_for((args, kwargs))
        return func(*args, **kwargs)

    def _before_module(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:  # the hook is one of all modules of the process
            self._join_for(args)

    def _join_for(self, values: Any) -> None:
        pending = self._pending
        if pending is not None and any(_share(pending, leaf) for leaf in tree_iter(values)):
            self.join()


def _share(pending: Tensor, value: object) -> bool:
    if not isinstance(value, Tensor) or value.device != pending.device:
        return False
    try:
        return value.untyped_storage().data_ptr() == pending.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # of a tensor that wraps others
        return True
