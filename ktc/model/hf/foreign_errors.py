"""Facts about an error of a model's own code: the line that raised it, and the version that wrote config.json."""

from __future__ import annotations

import os
import traceback
from pathlib import Path
from typing import Final

import torch
from transformers import PreTrainedConfig

from ktc.foundation import versions

OURS: Final = str(Path(__file__).parents[2]) + os.sep
_ELSEWHERE: Final = (str(Path(torch.__file__).parent) + os.sep, OURS)


def raising_line(error: BaseException) -> str:
    """Return the last line outside of torch and ktc, as `line` (file:number); empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if not frame.filename.startswith(_ELSEWHERE)), None)
    return f"`{last.line}` ({Path(last.filename).name}:{last.lineno})" if last else ""


def first_line(error: BaseException | None) -> str:
    """Return the first line of a foreign exception's message, at most 200 characters."""
    return (str(error).strip().splitlines() or [""])[0][:200]


def raised_by(error: BaseException) -> str:
    """Return the hint about an error of foreign code: the line that raised it, if it is known."""
    return f"it is raised by {line}" if (line := raising_line(error)) else ""


def of_another_version(config: PreTrainedConfig) -> str:
    """Return the hint that another release of transformers wrote config.json; empty if it is the installed one."""
    written, here = getattr(config, "transformers_version", None), versions.installed("transformers")
    if not written or not here or versions.release(str(written))[:2] == versions.release(here)[:2]:
        return ""
    return f"config.json was written by transformers {written!s:.20}, and {here} is installed"
