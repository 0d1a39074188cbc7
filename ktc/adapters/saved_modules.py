"""Modules that an adapter trained whole (`modules_to_save`) and that a compiled model cannot take.

In: an `Adapter` and the model. Refused (A604), before anything is loaded: values for weights that the model has in
another form, as those of routed experts. PEFT copies a module with its registered weights, and would omit the others.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ktc.adapters.plain import variants
from ktc.diagnostics import Diagnostic, InputRefused, KtcError, listing

if TYPE_CHECKING:
    from torch import nn

    from ktc.adapters.adapter import Adapter


def require_registered(adapter: Adapter, model: nn.Module, original: str) -> None:
    """Raise `InputRefused` (A604) if the adapter has values for weights that no module of the model registers."""
    from ktc.adapters.own_weights import own_name, own_weights

    wanted = adapter.names("modules_to_save")
    if not wanted:
        return
    weights = own_weights(model)
    fixed = weights.keys() - cast("Any", model).state_dict().keys()
    modules = cast("Iterable[tuple[str, nn.Module]]", model.named_modules())
    covered = tuple(f"{name}." for name, _ in modules if name.endswith(wanted))
    names = {own_name(entry.name, weights) for entry in adapter.tensors if ".base_layer." not in entry.name}
    if lost := sorted(name for name in names & fixed if name and name.startswith(covered)):
        message = (
            f"adapter `{adapter.folder.name}` trained {listing(wanted, 3)} whole, and the compiled model does not take "
            f"`{lost[0]}` from an adapter: it has that weight in another form"
        )
        raise InputRefused(Diagnostic("A604", message, hint=_instead(adapter, original)))


def _instead(adapter: Adapter, original: str) -> str:
    """Return the command that merges the adapter, where it is not refused."""
    from ktc.model.checkpoint.adapter_uses import loses_additions, stored_as
    from ktc.model.checkpoint.index import open_index

    alone = "use it on the original model: `PeftModel.from_pretrained`"
    try:
        stored = stored_as(open_index(Path(original)))
        if adapter.kind != "LORA" or any(variants(adapter.config)) or loses_additions(stored):
            return alone
    except KtcError:
        return alone
    merge = shlex.join(["ktc", "merge", original, str(adapter.folder), "-o", f"{adapter.folder.resolve().name}-merged"])
    return f"`{merge}` writes the model with it, which can be compiled"
