"""The state of a run's checkpoint, checked before the Trainer reads it: every file, every type, every size.

In: the folder of a checkpoint, and later the adapter and the optimizer that are to be restored. Out: the faults, each
with its file and field. The Trainer checks nothing: with a negative step a run never ends, and another shape raises
only after the model is loaded. Pickles are read with `weights_only`, from files that are stored uncompressed.
`training_args.bin` is never read.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import reprlib
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from ktc.diagnostics import listing
from ktc.foundation.decode import read_json
from ktc.foundation.regular_files import open_regular, read_regular
from ktc.model.checkpoint.header import HeaderRefused, read_header
from ktc.model.hf.foreign_errors import first_line

if TYPE_CHECKING:
    from torch.optim import Optimizer

WEIGHTS, CONFIG, STATE = "adapter_model.safetensors", "adapter_config.json", "trainer_state.json"
OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"
_RANDOM: Final = "rng_state*.pth"
_NEEDED: Final = (WEIGHTS, CONFIG, STATE, OPTIMIZER, SCHEDULER)
_FOREIGN: Final = ("config.json", "model*.safetensors*", "pytorch_model*", "adapter_model.bin")
_MOST_VALUES: Final = 1 << 16  # of the state of a scheduler that is not one of transformers
_LARGEST: Final = {SCHEDULER: 1 << 20, "rng_state": 1 << 24}  # bytes
_MOMENTS: Final = 32  # bytes of optimizer state per byte of the adapter: two fp32 moments of bf16 factors are 4
_MOST_STEPS: Final = 1 << 40  # steps of a run and tokens seen; JSON's integers have no bound
_LARGEST_NUMBER: Final = 1e300  # JSON has larger integers, which no float holds
_Test = Callable[[object], bool]


class _Damaged(Exception):
    """A file that no run of ktc writes so; the message names the file and the field."""


def faults(checkpoint: Path, *, complete: bool) -> Iterator[str]:
    """Yield the reasons why a checkpoint cannot be resumed, none if it is consistent.

    A `complete` one is of `ktc train`: one adapter, the optimizer, a scheduler of transformers and random states. Any
    other trainer may leave out all but its own state, save several adapters, and use another scheduler.
    """
    missing = [name for name in (_NEEDED if complete else (STATE,)) if not (checkpoint / name).exists()]
    if complete and not any(checkpoint.glob(_RANDOM)):
        missing.append("rng_state.pth")
    if missing:
        yield f"it lacks {listing(missing)}"
    unwanted = (*_FOREIGN, "*/") if complete else _FOREIGN
    foreign = sorted({path.name for pattern in unwanted for path in checkpoint.glob(pattern)})
    if foreign:
        yield f"it has {listing(foreign)}, which no run of ktc writes there"
    if STATE in missing:
        return
    try:
        step = _checked_state(checkpoint)
    except _Damaged as damaged:
        yield str(damaged)
        return
    if os.path.lexists(checkpoint / OPTIMIZER):
        yield from _fault_of(lambda: _check_optimizer(checkpoint, mapped=True))
    if os.path.lexists(checkpoint / SCHEDULER):
        yield from _fault_of(lambda: _check_scheduler(checkpoint, step, complete=complete))
    for path in sorted(checkpoint.glob(_RANDOM)):
        yield from _fault_of(lambda path=path: _check_random(path))


def adapter_fault(folder: Path, wanted: Mapping[str, Sequence[int]]) -> str:
    """Return why the adapter in `folder` is not one with tensors of these names and shapes, or ""."""
    try:
        shapes = {entry.name: list(entry.shape) for entry in read_header(folder / WEIGHTS)}
    except FileNotFoundError:
        return f"it lacks `{WEIGHTS}`"
    except HeaderRefused as refused:
        return refused.diagnostics[0].message
    except OSError as error:
        return f"`{WEIGHTS}`: {_reason(error)}"
    if odd := sorted(shapes.keys() ^ wanted.keys()):
        return f"`{WEIGHTS}` lacks `{odd[0]:.200}`, or should not have it"
    for name, shape in wanted.items():
        if shapes[name] != list(shape):
            return f"`{name}` of `{WEIGHTS}` has the shape {shapes[name]}, and this run's has {list(shape)}"
    return ""


def optimizer_fault(checkpoint: Path, optimizer: Optimizer) -> str:
    """Return why the checkpoint's optimizer state is not one of this optimizer, or "", also without such a state."""
    if not os.path.lexists(checkpoint / OPTIMIZER):
        return ""
    return next(_fault_of(lambda: _check_fit(_check_optimizer(checkpoint, mapped=False), optimizer)), "")


def _fault_of(check: Callable[[], object]) -> Iterator[str]:
    try:
        check()
    except _Damaged as damaged:
        yield str(damaged)


# The Trainer's own state ----------------------------------------------------------------------------------------------
def _checked_state(checkpoint: Path) -> int:
    """Return the number of steps done."""
    from transformers import TrainerState

    path = checkpoint / STATE
    try:
        content: object = read_json(read_regular(path))
    except (OSError, ValueError) as error:
        raise _Damaged(f"`{STATE}`: {_reason(error)}") from error
    if not isinstance(content, dict):
        raise _Damaged(f"`{STATE}` is not a JSON object")
    state = cast("dict[str, object]", content)
    if missing := sorted({"global_step", "max_steps", "log_history"} - state.keys()):
        raise _Damaged(f"`{STATE}` lacks `{missing[0]}`")
    if unknown := sorted(state.keys() - {field.name for field in fields(cast("Any", TrainerState))}):
        raise _Damaged(f"`{STATE}` has the unknown field `{unknown[0]:.40}`")
    for name, (fits, wanted) in _STATE_FIELDS.items():
        if name in state and not fits(state[name]):
            raise _Damaged(f"`{name}` of `{STATE}` is {_shown(state[name])}, expected {wanted}")
    step = cast("int", state["global_step"])
    numbered = re.fullmatch(r"checkpoint-(\d{1,18})", checkpoint.name)
    if numbered and int(numbered[1]) != step:
        raise _Damaged(f"`global_step` of `{STATE}` is {step}, and the folder is `{checkpoint.name}`")
    if step > cast("int", state["max_steps"]):
        raise _Damaged(f"`global_step` of `{STATE}` is {step}, beyond `max_steps`")
    _check_best(checkpoint, state.get("best_model_checkpoint"))
    return step


def _check_best(checkpoint: Path, best: object) -> None:
    """Check that the best checkpoint, which is loaded at the end of a run, is one of the same run."""
    if isinstance(best, str):
        named = Path(best)
        try:
            outside = named.is_dir() and named.resolve().parent != checkpoint.resolve().parent
        except OSError:
            outside = True
        if outside or not re.fullmatch(r"checkpoint-\d+", named.name):
            raise _Damaged(f"`best_model_checkpoint` of `{STATE}` is not a checkpoint of this run: {_shown(best)}")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MOST_STEPS


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and -_LARGEST_NUMBER <= cast("float", value) <= _LARGEST_NUMBER


def _is_not_negative(value: object) -> bool:
    return _is_number(value) and cast("float", value) >= 0


def _optional(test: _Test) -> _Test:
    return lambda value: value is None or test(value)


def _is_bool(value: object) -> bool:
    return type(value) is bool


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= 4096


def _is_history(value: object) -> bool:
    rows = cast("list[object]", value) if isinstance(value, list) else [None]
    # A loss may be NaN: a run continues after one.
    return all(
        isinstance(row, dict)
        and all(entry is None or type(entry) in (int, float, str) for entry in cast("dict[str, object]", row).values())
        for row in rows
    )


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


_STATE_FIELDS: Final[Mapping[str, tuple[_Test, str]]] = {
    **dict.fromkeys(("global_step", "max_steps", "num_train_epochs", "num_input_tokens_seen"), (_is_count, "a count")),
    **dict.fromkeys(("train_batch_size", "best_global_step"), (_optional(_is_count), "a count or null")),
    **dict.fromkeys(
        ("epoch", "total_flos", "logging_steps", "eval_steps", "save_steps"),
        (_optional(_is_not_negative), "a number from 0 on"),
    ),
    "best_metric": (_optional(_is_number), "a finite number or null"),
    "best_model_checkpoint": (_optional(_is_text), "a path or null"),
    **dict.fromkeys(
        ("is_local_process_zero", "is_world_process_zero", "is_hyper_param_search"), (_is_bool, "a truth value")
    ),
    "log_history": (_is_history, "a list of objects with numbers"),
    "trial_name": (_optional(_is_text), "a text or null"),
    **dict.fromkeys(("trial_params", "stateful_callbacks"), (_optional(_is_object), "an object or null")),
}  # fmt: skip


# Pickles of tensors ---------------------------------------------------------------------------------------------------
def _load(
    path: Path, most_bytes: int, allowed: Sequence[type | Callable[..., object]] = (), *, mapped: bool = False
) -> Any:
    """Return the values of a pickle of tensors without running code of it.

    `mapped` tensors stay in the file. Only a read without that, as the Trainer does it, checks their sizes there.
    """
    import torch

    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            if file.seek(0) or file.read(2) != b"PK":
                raise _Damaged(f"`{path.name}` is not written by `torch.save`")
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                raise _Damaged(f"`{path.name}` is compressed, which `torch.save` never does")
            if sum(entry.file_size for entry in entries) > most_bytes:
                raise _Damaged(f"`{path.name}` has more than {most_bytes} bytes")
        with torch.serialization.safe_globals(list(allowed)):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except _Damaged:
        raise
    except zipfile.BadZipFile as error:
        raise _Damaged(f"`{path.name}` is truncated") from error
    except Exception as error:  # the unpickler raises anything on an invalid file
        raise _Damaged(f"`{path.name}` cannot be read as tensors: {_reason(error)}") from error


def _check_optimizer(checkpoint: Path, *, mapped: bool) -> Mapping[str, Any]:
    """Return the state of an optimizer: values per parameter, and the groups of parameters."""
    import torch

    adapters = (path for path in (checkpoint / WEIGHTS, *checkpoint.glob(f"*/{WEIGHTS}")) if path.is_file())
    saved: Any = _load(
        checkpoint / OPTIMIZER, _MOMENTS * sum(path.stat().st_size for path in adapters) + (1 << 24), mapped=mapped
    )
    if not isinstance(saved, dict) or cast("dict[object, object]", saved).keys() != {"state", "param_groups"}:
        raise _Damaged(f"`{OPTIMIZER}` is not the state of an optimizer")
    state, groups = (cast("dict[str, Any]", saved)[name] for name in ("state", "param_groups"))
    if not _is_groups(groups) or not isinstance(state, dict):
        raise _Damaged(f"`param_groups` of `{OPTIMIZER}` is not a list of groups")
    numbers = {number for group in groups for number in group["params"]}
    for number, values in cast("dict[object, object]", state).items():
        if number not in numbers or not isinstance(values, dict):
            raise _Damaged(f"`state` of `{OPTIMIZER}` has {_shown(number)}, which is not a parameter")
        for name, value in cast("dict[object, object]", values).items():
            if isinstance(value, torch.Tensor) and not _is_plain(value):
                raise _Damaged(f"`{name}` of parameter {number} of `{OPTIMIZER}` is not a plain tensor")
    return cast("Mapping[str, Any]", saved)


def _is_groups(groups: object) -> bool:
    """Return whether this is a list of objects whose `params` count all parameters from 0 on."""
    listed: list[Any] = cast("list[Any]", groups) if isinstance(groups, list) else [None]
    if not all(isinstance(group, dict) and isinstance(cast("Any", group).get("params"), list) for group in listed):
        return False
    numbers: list[Any] = [number for group in listed for number in group["params"]]
    return all(type(number) is int for number in numbers) and sorted(numbers) == list(range(len(numbers)))


def _is_plain(tensor: Any) -> bool:
    """Return whether a tensor is dense, real and as large as its storage says."""
    import torch

    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() >= (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    )


def _check_fit(saved: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Check the groups, and the shapes of Adam's moments, against those of the optimizer that receives them."""
    import torch

    groups: Sequence[Mapping[str, Any]] = optimizer.param_groups
    saved_groups: Sequence[Mapping[str, Any]] = saved["param_groups"]
    if [len(group["params"]) for group in saved_groups] != [len(group["params"]) for group in groups]:
        raise _Damaged(f"`{OPTIMIZER}` is of other parameters than this run trains")
    for group, wanted in zip(saved_groups, groups, strict=True):
        for name in wanted.keys() - {"params", "initial_lr"}:
            if not _is_alike(group.get(name), wanted[name]) or (name == "betas" and max(group[name]) >= 1):
                raise _Damaged(f"`{name}` of `param_groups` of `{OPTIMIZER}` is {_shown(group.get(name))}")
        if unknown := sorted(map(str, group.keys() - wanted.keys() - {"initial_lr"})):
            raise _Damaged(f"`param_groups` of `{OPTIMIZER}` has the unknown entry `{unknown[0]:.40}`")
        if not _is_not_negative(group.get("initial_lr", 0.0)):
            raise _Damaged(f"`initial_lr` of `param_groups` of `{OPTIMIZER}` is {_shown(group['initial_lr'])}")
    parameters = list(itertools.chain.from_iterable(group["params"] for group in groups))
    is_adam = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    for number, values in cast("Mapping[int, Mapping[str, Any]]", saved["state"]).items():
        if is_adam:
            _check_moments(number, values, tuple(parameters[number].shape))
            continue
        for name, value in values.items():
            if not isinstance(value, torch.Tensor) and not _is_small(value):
                raise _Damaged(f"`{name:.40}` of parameter {number} of `{OPTIMIZER}` is {_shown(value)}")


def _check_moments(number: int, values: Mapping[str, Any], shape: tuple[int, ...]) -> None:
    """Check the state that AdamW has of one parameter."""
    import torch

    if set(values) != {"step", "exp_avg", "exp_avg_sq"}:
        raise _Damaged(f"parameter {number} of `{OPTIMIZER}` has the state {listing(map(str, values))}")
    for name in ("exp_avg", "exp_avg_sq"):
        moment = values[name]
        if not (isinstance(moment, torch.Tensor) and moment.is_floating_point() and tuple(moment.shape) == shape):
            raise _Damaged(f"`{name}` of parameter {number} of `{OPTIMIZER}` has not the shape {list(shape)}")
    step = values["step"]
    value = step.item() if isinstance(step, torch.Tensor) and step.numel() == 1 else step
    if not (type(value) in (int, float) and 0 <= value < _MOST_STEPS):
        raise _Damaged(f"`step` of parameter {number} of `{OPTIMIZER}` is {_shown(step)}")


def _is_alike(value: object, wanted: object) -> bool:
    """Return whether an option of an optimizer is of the same kind: numbers may change, switches may not."""
    if isinstance(wanted, tuple):
        listed = cast("Sequence[object]", value) if isinstance(value, list | tuple) else ()
        return len(listed) == len(cast("tuple[object, ...]", wanted)) and all(map(_is_not_negative, listed))
    if type(wanted) in (int, float):
        return _is_not_negative(value)
    return type(value) is type(wanted) and value == wanted


def _check_scheduler(checkpoint: Path, step: int, *, complete: bool) -> None:
    """Check the state of a scheduler, whose values replace the attributes of the scheduler as they are.

    Those of transformers are `LambdaLR`.
    """
    import torch

    saved: object = _load(checkpoint / SCHEDULER, _LARGEST[SCHEDULER])
    if not isinstance(saved, dict):
        raise _Damaged(f"`{SCHEDULER}` is not the state of a scheduler")
    state = cast("dict[object, object]", saved)
    if not complete and "lr_lambdas" not in state:
        for name, value in state.items():
            scheduler = torch.optim.lr_scheduler
            methods = {*dir(scheduler.LRScheduler), *dir(scheduler.ReduceLROnPlateau)}
            if not isinstance(name, str) or name in methods or not _is_small(value):
                raise _Damaged(f"`{name!s:.40}` of `{SCHEDULER}` is {_shown(value)}")
        return
    wanted = _scheduler_fields(step)
    if odd := sorted(map(str, state.keys() ^ wanted.keys())):
        raise _Damaged(f"`{SCHEDULER}` lacks `{odd[0]:.40}`, or should not have it")
    for name, value in state.items():
        if not wanted[cast("str", name)](value):
            raise _Damaged(f"`{name}` of `{SCHEDULER}` is {_shown(value)}")


def _is_small(value: object) -> bool:
    """Return whether a value is of numbers, texts and a bounded number of lists and objects."""
    left, seen = [value], 0
    while left:
        item = left.pop()
        seen += 1
        if isinstance(item, dict):
            left += [*cast("dict[object, object]", item).keys(), *cast("dict[object, object]", item).values()]
        elif isinstance(item, list | tuple):
            left += cast("Sequence[object]", item)
        elif not (item is None or type(item) in (bool, int, float) or _is_text(item)):
            return False
        if seen + len(left) > _MOST_VALUES:
            return False
    return True


def _scheduler_fields(step: int) -> Mapping[str, _Test]:
    """Return what each value of the installed torch's `LambdaLR` must be after `step` steps."""
    import torch

    known: Mapping[str, _Test] = {
        "base_lrs": _are_rates,
        "_last_lr": _are_rates,
        "last_epoch": lambda value: _is_count(value) and cast("int", value) <= step,
        "_step_count": lambda value: _is_count(value) and cast("int", value) <= step + 1,
        "lr_lambdas": lambda value: isinstance(value, list) and all(one in (None, {}) for one in cast("Any", value)),
    }
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    fresh = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0).state_dict()
    return {name: known.get(name, _is_alike_in_type(value)) for name, value in fresh.items()}


def _is_alike_in_type(fresh: object) -> _Test:
    return lambda value: type(value) is type(fresh)


def _are_rates(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_not_negative, cast("list[object]", value)))


def _check_random(path: Path) -> None:
    """Set the states of random generators on generators of our own: each of them checks its state."""
    import numpy as np
    import torch

    keys = np.zeros(1, np.uint32)  # numpy pickles such an array in its state
    allowed = (cast("Any", keys.__reduce__()[0]), np.ndarray, np.dtype, type(keys.dtype))
    saved: object = _load(path, _LARGEST["rng_state"], allowed)
    if not isinstance(saved, dict):
        raise _Damaged(f"`{path.name}` is not the state of random generators")
    state = cast("dict[object, Any]", saved)
    setters: Mapping[str, Callable[[Any], object]] = {
        "python": random.Random().setstate,
        "numpy": np.random.RandomState().set_state,
        "cpu": torch.Generator().set_state,
    }
    for name, setter in setters.items():
        try:
            setter(state[name])
        except Exception as error:  # foreign state: each generator has errors of its own
            raise _Damaged(f"`{name}` of `{path.name}` is not a state of that generator: {_reason(error)}") from error
    gpus: object = state.get("cuda")
    for gpu in cast("list[object]", gpus) if isinstance(gpus, list) else [] if gpus is None else [gpus]:
        if not (isinstance(gpu, torch.Tensor) and gpu.dtype is torch.uint8 and gpu.numel() <= 64):
            raise _Damaged(f"`cuda` of `{path.name}` is not a state of that generator")


def _reason(error: BaseException) -> str:
    """Return the first sentence of an error."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"{first_line(error).partition('. ')[0]:.160}" or type(error).__name__


def _shown(value: object) -> str:
    return f"`{reprlib.repr(value):.100}`"
