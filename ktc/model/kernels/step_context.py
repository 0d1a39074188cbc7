"""`StepContext`: what steers the step of one model that the present thread computes.

In: fields that a caller of the model sets for a while. Out: the same fields, read by the model's modules.
A loaded model has one context, and its modules that read it hold a reference. Every thread has fields of its own: no
other model, no other thread of the same model and no thread of autograd reads them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

from torch import Tensor, nn

from ktc.model.kernels.kernel_calls import KernelCall, NativeCall, bind_later
from ktc.model.kernels.kernel_library import Arguments, Engine

if TYPE_CHECKING:
    from ktc.model.attention.sparse import FollowedLayer
    from ktc.model.decode_steps.step_ahead import StepAhead
    from ktc.model.experts.host.host_node import HostNodes

_NAME = "step_context"  # of the attribute of a module


class StepFields(TypedDict, total=False):
    """The fields of a context."""

    recorder: Callable[[KernelCall], None] | None  # receives each kernel call, after it was computed
    host_nodes: HostNodes | None  # take the calls of experts as host functions of a GPU's stream
    followed_layer: FollowedLayer | None  # of the cache, whose index the present attention module keeps
    step_ahead: StepAhead | None  # waits for the steps that `generate` does not wait for
    reads_prompt: bool  # whether `generate` reads its prompt


class StepContext(threading.local):
    """The fields of `StepFields`. A copied or pickled model has a new context."""

    recorder: Callable[[KernelCall], None] | None = None
    host_nodes: HostNodes | None = None
    followed_layer: FollowedLayer | None = None
    step_ahead: StepAhead | None = None
    reads_prompt: bool = False

    @classmethod
    def of(cls, model: nn.Module) -> StepContext:
        """Return the context of a model. The first call makes it and gives it to the modules."""
        return vars(model).get(_NAME) or cls.given_to(model)

    @classmethod
    def given_to(cls, model: nn.Module) -> StepContext:
        """Give the context of a model to every module that reads one, also to those that came later."""
        context = vars(model).setdefault(_NAME, cls())
        for module in cast("Any", model).modules():
            if _NAME in vars(module):
                vars(module)[_NAME] = context
        return context

    @contextmanager
    def entered(self, **fields: Unpack[StepFields]) -> Generator[None]:
        """Set fields for this thread inside the block."""
        before = {name: getattr(self, name) for name in fields}
        vars(self).update(fields)
        try:
            yield
        finally:
            vars(self).update(before)

    def record_call(
        self, call: NativeCall, engine: Engine, arguments: Callable[..., Arguments],
        reads: tuple[Tensor | None, ...], out: Tensor,
    ) -> None:  # fmt: skip
        """Hand the recorder, where there is one, a kernel call that read tensors and wrote `out`."""
        if self.recorder is not None:
            self.recorder(KernelCall(bind_later(call, engine, arguments), reads, out))

    def __deepcopy__(self, memo: dict[int, Any]) -> StepContext:
        return StepContext()

    def __reduce__(self) -> Any:
        return StepContext, ()
