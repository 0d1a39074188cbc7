"""The processor of a checkpoint that reads images: it writes placeholders into the text, and makes pixels of images.

In: the folder of a compiled model, then messages with images. Out: the arguments of a call of the model, as
transformers' `AutoProcessor` makes them. Refused: a model without towers, a folder without such a processor, and
messages that its template or its code rejects. Nothing is fetched, and no code of the folder runs unless it is trusted.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

from ktc.diagnostics import Diagnostic, InputRefused
from ktc.foundation.regular_files import require_regular
from ktc.model.hf.foreign_errors import first_line
from ktc.model.hf.tokenizer import read_tokenizer

_FILES: Final = ("*.json", "*.jinja", "*.model", "*.txt")
_OF_PROCESSOR: Final = ("processor_config.json", "preprocessor_config.json")
_PARTS: Final = ("vision_config", "visual", "vision_tower", "image_token_id", "image_token_index")  # of a config.json
_VIDEO: Final = "video_processor"  # requires torchvision, and no image needs it


class RejectedMessages(Exception):
    """Messages that the processor does not take, with its own words."""


def is_class_of_images(name: str) -> bool:
    """Return whether a class of transformers by this name reads images beside text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return name in cast("dict[str, str]", MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES).values()


def may_read_images(folder: Path, class_name: str, own_code: bool) -> bool:
    """Return whether the model in `folder` reads images: its class is stock's, or its own code comes with the parts."""
    if not own_code:
        return is_class_of_images(class_name)
    from transformers import PreTrainedConfig

    if any((folder / name).is_file() for name in _OF_PROCESSOR):
        return True
    settings, _ = PreTrainedConfig.get_config_dict(str(folder), local_files_only=True)
    return any(name in settings for name in _PARTS)


def placeholder_id(processor: Any) -> int | None:
    """Return the token that a text has for an image, as the processor or its tokenizer names it; `None` if neither."""
    for owner in (processor, processor.tokenizer):
        number, text = getattr(owner, "image_token_id", None), getattr(owner, "image_token", None)
        if isinstance(number, int):
            return number
        if isinstance(text, str) and (known := processor.tokenizer.get_vocab().get(text)) is not None:
            return int(known)
    return None


def read_processor(folder: Path, code: str, *, trusted: bool = False) -> Any:
    """Return the processor of `folder`; without torchvision one of images alone. Raises InputRefused with `code`."""
    from transformers import AutoProcessor

    auto: Any = AutoProcessor
    try:
        require_regular(folder, _FILES)
        processor = auto.from_pretrained(str(folder), trust_remote_code=trusted, local_files_only=True)
    except ImportError as error:
        processor = _of_images_alone(folder, code)
        if processor is None:
            raise _unreadable(folder, code, error) from error
    except Exception as error:  # foreign code on files that anybody may have written
        raise _unreadable(folder, code, error) from error
    if not hasattr(processor, "image_processor"):
        message = f"`{folder}` has no processor for images"
        raise InputRefused(Diagnostic(code, message, hint="copy `*processor_config.json` of the original"))
    return processor


def _of_images_alone(folder: Path, code: str) -> Any:
    """Return the processor of the folder's model type without its part for videos; None for one of another build."""
    import transformers
    from transformers.models.auto import processing_auto

    settings, _ = transformers.PretrainedConfig.get_config_dict(str(folder), local_files_only=True)
    names: Mapping[str, str] = cast("Any", processing_auto).PROCESSOR_MAPPING_NAMES
    name, library = names.get(str(settings.get("model_type"))), cast("Any", transformers)
    stock: Any = getattr(library, name or "", None)
    if stock is None or set(stock.get_attributes()) != {"image_processor", "tokenizer", _VIDEO}:
        return None

    def require_class(processor: Any, argument_name: str, argument: Any) -> Any:
        return None if argument is None else stock.check_argument_for_proper_class(processor, argument_name, argument)

    made: Any = type(stock.__name__, (stock,), {"check_argument_for_proper_class": require_class})
    try:
        parts = {
            "image_processor": library.AutoImageProcessor.from_pretrained(str(folder), local_files_only=True),
            "tokenizer": read_tokenizer(folder, code),
        }
        written, _ = made.get_processor_dict(str(folder), local_files_only=True)
        return made.from_args_and_dict([parts.get(part) for part in stock.get_attributes()], written)
    except (ImportError, OSError, TypeError, ValueError) as error:
        raise _unreadable(folder, code, error) from error


def _unreadable(folder: Path, code: str, error: BaseException) -> InputRefused:
    message = f"`{folder}` has no processor that can be read: {first_line(error)}"
    hint = "`pip install torchvision`" if "torchvision" in str(error).lower() else "copy those files of the original"
    return InputRefused(Diagnostic(code, message, hint=hint))


def image_inputs(
    processor: Any, messages: Sequence[Mapping[str, Any]], *, tools: Any = None, prompt: bool = True,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:  # fmt: skip
    """Return `input_ids` (1, T) int64, `attention_mask`, and tensors of pixels, of messages with images.

    Contents are lists of parts: `{"type": "text", "text": ...}` and `{"type": "image", "image": an RGB image}`. With
    `prompt` the text ends where an answer begins. `variables` are those of the template, and reach it alone: the
    processor would take some of them for addresses that it fetches, or for sizes. Raises RejectedMessages.
    """
    template: Any = getattr(processor, "chat_template", None)
    template = cast("dict[str, Any]", template).get("default") if isinstance(template, dict) else template
    if not template:
        raise RejectedMessages("the processor has no chat template, which places images in a text")
    given, images = [dict(message) for message in messages], _images_of(messages)
    tokenizer: Any = processor.tokenizer
    try:
        text: str = tokenizer.apply_chat_template(
            given, chat_template=template, tools=tools, add_generation_prompt=prompt, tokenize=False, **variables
        )
    except Exception as error:
        raise RejectedMessages(first_line(error) or type(error).__name__) from error
    begins = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    return raw_inputs(processor, text, images, special_tokens=not begins)


def _images_of(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in cast("list[Any]", content))
    return [part["image"] for part in parts if part.get("type") == "image"]


def raw_inputs(processor: Any, text: str, images: Sequence[Any], *, special_tokens: bool = True) -> dict[str, Any]:
    """Return the inputs of a text that has the placeholders of its images. Raises RejectedMessages.

    Without `special_tokens` the tokenizer adds none, as for a text that a chat template has written.
    """
    added = {} if special_tokens else {"add_special_tokens": False}
    try:
        made = dict(processor(text=[text], images=list(images) or None, return_tensors="pt", **added))
    except Exception as error:
        raise RejectedMessages(first_line(error) or type(error).__name__) from error
    kinds = made.get("mm_token_type_ids")
    if images and kinds is not None and not kinds.any():  # transformers 5.6 leaves images out without a word
        raise RejectedMessages("the text has no placeholder for an image")
    return made


def with_tokenizer(processor: Any, tokenizer: Any) -> Any:
    """Return the processor with the tokenizer of an adapter, and with its chat template if it has one."""
    if processor is None or tokenizer is processor.tokenizer:
        return processor
    made = copy.copy(processor)
    made.tokenizer = tokenizer
    made.chat_template = getattr(tokenizer, "chat_template", None) or processor.chat_template
    return made


def on_device(inputs: Mapping[str, Any], device: Any, dtype: Any) -> dict[str, Any]:
    """Return tensors on `device`, those of floating point as `dtype`, and other values as they are."""
    import torch

    return {
        name: value.to(device, dtype if value.is_floating_point() else None)
        if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }  # fmt: skip
