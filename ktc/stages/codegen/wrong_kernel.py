"""The findings of self-tests: how far a result is from the reference, and the refusal (H225) of a wrong kernel."""

from __future__ import annotations

from torch import Tensor

from ktc.diagnostics import Diagnostic, KtcError
from ktc.model.kernels.spec import Spec

_HINT = "try another compiler with `CXX`"


def relative_error(ours: Tensor, expected: Tensor) -> float:
    """Return the relative Frobenius error, computed in fp64."""
    wide = expected.double()
    return norm(ours.double() - wide) / norm(wide)


def norm(tensor: Tensor) -> float:
    """Return the Frobenius norm."""
    return float(tensor.square().sum().sqrt())


def wrong(spec: Spec, what: str, hint: str = _HINT) -> KtcError:
    """Return the error for a kernel: `what` it computes."""
    return KtcError(Diagnostic("H225", f"the built kernel `{spec.entry}` is wrong: {what}", hint=hint))


def wrong_output(spec: Spec, what: str) -> KtcError:
    """Return the error for a kernel whose output is wrong."""
    return wrong(spec, f"its output {what}")
