"""Capture: a Hugging Face causal LM -> one normal-form graph per distinct block, on meta tensors, no weight read.

With `twin`, the only place that knows Hugging Face model classes and names.
"""

from ktc.stages.capture.model import capture
from ktc.stages.capture.source import TO_INSPECT, Reading, open_model
from ktc.stages.capture.types import (
    BlockGraph,
    BlockSite,
    CapturedModel,
    ExpertList,
    ModelSource,
    ModuleInfo,
    TensorInfo,
)

__all__ = [
    "TO_INSPECT", "BlockGraph", "BlockSite", "CapturedModel", "ExpertList", "ModelSource", "ModuleInfo", "Reading",
    "TensorInfo", "capture", "open_model",
]  # fmt: skip
