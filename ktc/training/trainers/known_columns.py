"""The columns of micro-batches that are not padding, counted before the host needs them.

In: batches that were fetched ahead, on a GPU. Out: for a mask of theirs the number of columns up to the last token or
label, and whether those have no padding. Counted when their step begins, they make the host wait for the step before.
Tensors that were changed since are not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from ktc.model.experts.private_api import version_of
from ktc.model.kernels.sent_values import SentValues

IGNORED: Final = -100  # the label of tokens that are not learned
_DEVICES: Final = {"cuda"}  # that compute while the host does not wait
_COLUMNS, _WHOLE = "_ktc_columns", "_ktc_whole"  # attributes of masks


@dataclass(frozen=True, slots=True)
class _Columns:
    labels: Tensor
    versions: tuple[int, int]
    sent: SentValues  # of all batches that were counted together
    index: int


def last_named(mask: Tensor, labels: Tensor) -> Tensor:
    """Return the number of columns up to the last one with a token or a label."""
    columns = ((mask != 0) | (labels != IGNORED)).any(0)
    return (columns * torch.arange(1, len(columns) + 1, device=columns.device)).max()


def count_columns(batches: Iterable[Any]) -> None:
    """Let a GPU count the columns of batches, and send their numbers to the host."""
    counted: list[tuple[Tensor, Tensor]] = []
    numbers: list[Tensor] = []
    for batch in batches:
        if not isinstance(batch, Mapping):
            continue
        mask, labels = (cast("Mapping[str, Any]", batch).get(name) for name in ("attention_mask", "labels"))
        if not isinstance(mask, Tensor) or not isinstance(labels, Tensor) or mask.device != labels.device:
            continue
        if mask.device.type in _DEVICES and mask.ndim == 2 and mask.shape == labels.shape:
            end = last_named(mask, labels)
            behind = torch.arange(mask.shape[1], device=mask.device) >= end
            numbers.append(torch.stack([end, ((mask != 0) | behind).all().to(end.dtype)]))
            counted.append((mask, labels))
    if not numbers or len({number.device for number in numbers}) > 1:
        return
    sent = SentValues(torch.stack(numbers))
    for index, (mask, labels) in enumerate(counted):
        setattr(mask, _COLUMNS, _Columns(labels, (version_of(mask), version_of(labels)), sent, index))


def known_columns(mask: Tensor, labels: Tensor) -> tuple[int, bool] | None:
    """Return the number of columns, and whether those have no padding, None if they were not counted."""
    known = cast("_Columns | None", vars(mask).get(_COLUMNS))
    if known is None or known.labels is not labels or known.versions != (version_of(mask), version_of(labels)):
        return None
    end, whole = known.sent.read()[known.index]
    return int(end), bool(whole)


def note_whole(mask: Tensor, *, whole: bool) -> None:
    """Note whether a mask names every position."""
    setattr(mask, _WHOLE, (version_of(mask), whole))


def known_whole(mask: Tensor) -> bool | None:
    """Return whether a mask names every position, None if that is not known."""
    version, whole = cast("tuple[int, bool | None]", vars(mask).get(_WHOLE, (-1, None)))
    return whole if version == version_of(mask) else None
