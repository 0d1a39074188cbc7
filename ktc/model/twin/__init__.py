"""Small twins of a model family: a config shrunk to the size of a twin, the model built from it, and its checkpoint.

With `capture`, the only place that knows Hugging Face model classes and names.
"""

from ktc.model.twin.build import build
from ktc.model.twin.checkpoint import names, write
from ktc.model.twin.families import default_config, moe_families, whole_families
from ktc.model.twin.images import with_image
from ktc.model.twin.layers import depth_of, first_layers, layers_with_experts
from ktc.model.twin.shrink import shrink

__all__ = [
    "build", "default_config", "depth_of", "first_layers", "layers_with_experts", "moe_families", "names", "shrink",
    "whole_families", "with_image", "write",
]  # fmt: skip
