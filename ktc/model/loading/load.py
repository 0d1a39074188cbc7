"""`ktc.load`: a compiled model from its folder.

In: the folder of a compiled model. Out: an HF-compatible causal LM. Refused, besides what `load_as` refuses: a class
that transformers does not have, model code that is not trusted or not the one that was compiled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

import transformers
from transformers import PreTrainedModel

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.model.hf import remote_code
from ktc.model.loading.compiled_model import compiled_class
from ktc.model.loading.load_as import LoadOptions, load_as
from ktc.model.manifest.manifest import Manifest, read_manifest


def load(path: str | Path, *, trust_remote_code: bool = False, **options: Unpack[LoadOptions]) -> PreTrainedModel:
    """Load the compiled model in `path`, in evaluation mode, without adapters.

    Args:
        weights: The checkpoint, if it has moved since the compilation.
        reference: Run every op of ktc as its PyTorch reference in fp32. This needs no library, and generates the same
            tokens as the stock model in fp32.
        map: Map experts read-only from the packed store, shared by all processes that do so, and the other weights
            from the checkpoint. The load is immediate; the first tokens wait for their pages. By default experts are
            read from the packed store into huge pages if there is one.
        trust_remote_code: Run the code of the checkpoint's folder that the model was compiled with.
        random_weights: A seed, to make random weights in memory instead of reading the checkpoint, for measurements.
            The model may have been compiled without a checkpoint.
        progress: Called with the bytes read and the bytes to read.

    Raises:
        InputRefused: The folder, its checkpoint or the options cannot be used; the diagnostic has the remedy.
        TypeError: An option is unknown.
        HostLacks: This machine lacks an instruction set, memory or a device.
    """
    manifest = read_manifest(Path(path))
    weights = options.get("weights")
    checkpoint = None if weights is None else Path(weights)
    model_class = compiled_class(stock_class(manifest, Path(path), checkpoint, trust_remote_code=trust_remote_code))
    return load_as(model_class, Path(path), **options)


def stock_class(
    manifest: Manifest, folder: Path, checkpoint: Path | None = None, *, trust_remote_code: bool = False
) -> type[PreTrainedModel]:
    """Return the class that was compiled: of transformers, or of the code in the `checkpoint`.

    Raise `InputRefused`: L403 if transformers lacks the class, L425 for untrusted code, L426 for code that has changed
    since the compilation.
    """
    if manifest.model.own_code:
        return _class_of_its_own_code(manifest, folder, checkpoint or Path(manifest.model.folder), trust_remote_code)
    stock = getattr(transformers, manifest.model.class_name, None)
    if not (isinstance(stock, type) and issubclass(stock, PreTrainedModel) and stock is not PreTrainedModel):
        message = f"transformers {transformers.__version__} has no model class `{manifest.model.class_name}`"
        hint = f"install transformers {manifest.versions.transformers}, or compile again: `{manifest.renewal(folder)}`"
        raise InputRefused(Diagnostic("L403", message, hint=hint))
    return stock


def _class_of_its_own_code(manifest: Manifest, folder: Path, checkpoint: Path, trusted: bool) -> type[PreTrainedModel]:
    compiled, present = manifest.model.code, remote_code.code_files(checkpoint)
    if not trusted:
        file = remote_code.model_file(checkpoint) or ", ".join(compiled)
        message = f"`{folder.name}` is a model of its own code, and loading it would run `{checkpoint / file}`"
        hint = "if you trust that code: `load(trust_remote_code=True)`"
        raise InputRefused(Diagnostic("L425", message, hint=hint))
    changed = sorted(name for name in compiled.keys() | present if compiled.get(name) != present.get(name))
    if changed:
        message = f"the code of the model is not the one that was compiled: `{checkpoint / changed[0]}` differs"
        hint = f"compile again: `{manifest.renewal(folder)}`"
        raise InputRefused(Diagnostic("L426", message, hint=hint))
    return remote_code.run_code(checkpoint, folder)[1]
