"""The reasons why foreign code is not captured, in words: the line of the model that reads data, or that raises."""

from __future__ import annotations

import traceback

from ktc.model.hf.foreign_errors import OURS, first_line, raising_line
from ktc.stages.capture.expert_hits import DependsOnData

# Messages of torch when code reads the values of a meta tensor.
NO_DATA = ("nonzero", "no data", "on meta tensors", "data-dependent")


def reads_data(error: BaseException) -> bool:
    """Return whether code raises an exception because it reads data that a run on meta tensors does not have."""
    return isinstance(error, DependsOnData) or any(words in str(error) for words in NO_DATA)


def reason_of(error: Exception) -> str:
    """Return why code does not run on meta: the line of the model that reads data, or that raises."""
    frames = traceback.extract_tb(error.__traceback__)
    line = raising_line(error)
    raised = f"{type(error).__name__}: {first_line(error)}"
    if not line:
        return raised
    if isinstance(error, DependsOnData):
        return f"its code depends on data: {line} reads more than which experts have tokens"
    if frames[-1].filename.startswith(OURS):
        return raised
    if any(words in str(error) for words in NO_DATA):
        return f"its code depends on data: {line}"
    if isinstance(error, NotImplementedError) and "Meta tensors" in str(error):
        return f"it does not run without data: {line}"
    return f"{line} raises {raised}"
