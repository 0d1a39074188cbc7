"""Whether a checkpoint can take the place of the one that a model was compiled from.

In: the compiled model's config, the rows of `weights.json`, and the folder of the other checkpoint. The rows are
compared with its codes, since the compiled config does not have the quantisation. Refused: another config, and weights
that are quantised in another way (L405); inconsistent quantised weights (I117).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from transformers import PreTrainedConfig

from ktc.diagnostics import Diagnostic, InputRefused, listing
from ktc.foundation.decode import read_json
from ktc.foundation.regular_files import read_regular
from ktc.model.checkpoint.index import CheckpointIndex
from ktc.model.checkpoint.quantised import stored_weights
from ktc.model.checkpoint.source import Quantised, WeightSource

_QUANTISATION: Final = "quantization_config"
# Keys of config.json about its writer, and about dtypes or codes: rows of `weights.json` have those of the tensors.
_OF_THE_WRITER: Final = frozenset({
    "_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", _QUANTISATION,
})  # fmt: skip


def require_same_config(compiled: PreTrainedConfig, checkpoint: Path) -> None:
    """Raise InputRefused (L405) for a checkpoint without a config, or with another one than the compiled model's."""
    path = checkpoint / "config.json"
    try:
        content = {name: _plain(part) for name, part in _content(path).items() if name != _QUANTISATION}
        present = type(compiled).from_dict(copy.deepcopy(content)).to_dict()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        message = f"`{path}` is not the config of this model: {str(error).partition(chr(10))[0][:200]}"
        raise InputRefused(Diagnostic("L405", message, hint="name the folder of a checkpoint")) from error
    wanted = compiled.to_dict()
    differ = sorted(
        name for name in (wanted.keys() | present.keys()) - _OF_THE_WRITER if wanted.get(name) != present.get(name)
    )
    if differ:
        message = f"`{path}` has other values of {listing(differ, 3)} than the compiled model"
        raise InputRefused(Diagnostic("L405", message, hint="compile that model"))


def require_same_codes(sources: Iterable[WeightSource], index: CheckpointIndex) -> None:
    """Raise InputRefused: L405 where a weight is stored in other codes than its row reads, I117 where codes are wrong.

    The load itself checks sizes and missing tensors.
    """
    if index.gguf is not None:
        return
    config = _content(index.folder / "config.json")
    inner = config.get("text_config")
    of_text = cast("Mapping[str, Any]", inner).get(_QUANTISATION) if isinstance(inner, dict) else None
    weights, problems = stored_weights(index.tensors, config.get(_QUANTISATION) or of_text)
    if problems:
        raise InputRefused(*problems[:10])
    quantised = {weight.entry.name: weight.quantised for weight in weights}
    for row in sources:
        if row.source_key in quantised and _meaning(quantised[row.source_key]) != _meaning(row.quantised):
            here, wanted = (_in_words(codes) for codes in (quantised[row.source_key], row.quantised))
            message = f"`{row.source_key}` of `{index.folder}` has {here}, and the compiled model reads {wanted}"
            raise InputRefused(Diagnostic("L405", message, hint="compile that model"))


def _content(path: Path) -> dict[str, Any]:
    content: object = read_json(read_regular(path))
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    return cast("dict[str, Any]", content)


def _plain(part: Any) -> Any:
    """Return a part of a config without its quantisation, which that of a text model may have."""
    if not isinstance(part, dict):
        return part
    return {name: value for name, value in cast("dict[str, Any]", part).items() if name != _QUANTISATION}


def _meaning(codes: Quantised | None) -> tuple[object, ...]:
    if codes is None:
        return ()
    return codes.method, codes.block, codes.scale.dtype, codes.zero_point is not None


def _in_words(codes: Quantised | None) -> str:
    if codes is None:
        return "plain values"
    zero_points = " with zero points" if codes.zero_point is not None else ""
    return f"{codes.method} codes, a {codes.scale.dtype} scale for {codes.block[0]}x{codes.block[1]}{zero_points}"
