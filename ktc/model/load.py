"""Loading a compiled model: what `ktc.load` is.

In: the folder of a compiled model. Out: an HF-compatible causal LM. Refused, besides what `load_as` refuses: a class
that transformers does not have, model code that is not trusted or not the one that was compiled.
"""

from __future__ import annotations

from pathlib import Path

import transformers
from transformers import PreTrainedModel

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.hf import remote_code
from ktc.model.compiled_model import compiled_class
from ktc.model.load_as import load_as
from ktc.model.manifest import Manifest, read_manifest
from ktc.model.progress import Progress


def load(
    path: str | Path,
    *,
    weights: str | Path | None = None,
    reference: bool = False,
    map: bool = False,
    allow_nonfinite: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> PreTrainedModel:
    """The compiled model in `path`, in evaluation mode, without adapters.

    `weights` names the checkpoint if it has moved since the compilation. `reference` runs every op of ktc as its
    PyTorch reference in fp32, needs no library, and generates token for token what the stock model in fp32 does.
    Where `ktc pack` has left a packed store, experts are read from it into huge pages; with `map` they are mapped from
    it, read-only and shared by all processes that do so, and the other weights from the checkpoint: at once, but the
    first tokens wait for their pages. `trust_remote_code` runs the code that the model was compiled with, where its
    folder brought it along. `progress` is called with the bytes read and the bytes to read.
    Raises `InputRefused` or `HostLacks`, each with what to do.
    """
    manifest = read_manifest(Path(path))
    checkpoint = None if weights is None else Path(weights)
    model_class = compiled_class(stock_class(manifest, Path(path), checkpoint, trust_remote_code=trust_remote_code))
    return load_as(
        model_class,
        Path(path),
        weights=weights,
        reference=reference,
        map=map,
        allow_nonfinite=allow_nonfinite,
        progress=progress,
    )


def stock_class(
    manifest: Manifest, folder: Path, checkpoint: Path | None = None, *, trust_remote_code: bool = False
) -> type[PreTrainedModel]:
    """The class that was compiled: of transformers, or of the code in the `checkpoint`.

    Raises `InputRefused`: L403 where transformers has none of that name, L425 for code that is not trusted, L426 for
    code that is not the one that was compiled.
    """
    if manifest.model.own_code:
        return _class_of_its_own_code(manifest, folder, checkpoint or Path(manifest.model.folder), trust_remote_code)
    found = getattr(transformers, manifest.model.class_name, None)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel) and found is not PreTrainedModel):
        message = f"transformers {transformers.__version__} has no model class `{manifest.model.class_name}`"
        hint = f"install transformers {manifest.versions.transformers}, or compile again: `{manifest.renewal(folder)}`"
        raise InputRefused(Diagnostic("L403", message, hint=hint))
    return found


def _class_of_its_own_code(manifest: Manifest, folder: Path, checkpoint: Path, trusted: bool) -> type[PreTrainedModel]:
    compiled, found = manifest.model.code, remote_code.code_files(checkpoint)
    if not trusted:
        file = remote_code.model_file(checkpoint) or ", ".join(compiled)
        message = f"`{folder.name}` is a model of its own code, and loading it would run `{checkpoint / file}`"
        hint = "if you trust that code: `load(trust_remote_code=True)`"
        raise InputRefused(Diagnostic("L425", message, hint=hint))
    changed = sorted(name for name in compiled.keys() | found if compiled.get(name) != found.get(name))
    if changed:
        message = f"the code of the model is not the one that was compiled: `{checkpoint / changed[0]}` differs"
        hint = f"compile again: `{manifest.renewal(folder)}`"
        raise InputRefused(Diagnostic("L426", message, hint=hint))
    return remote_code.run_code(checkpoint, folder)[1]
