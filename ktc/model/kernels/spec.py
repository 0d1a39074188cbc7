"""`Spec`: what one kernel is generated from, of any kind. A spec holds all that the template of its kind reads."""

from ktc.model.targets.target import Spec

__all__ = ["Spec"]
