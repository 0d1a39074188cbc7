"""Matching: find the places of each rule in a captured model, and near misses of rules without a match.

Matching does not decide: conflicts are the task of `plan`. It reads the captured graphs once. A rewrite never creates
a new match, so the order of rules has no effect.
"""

from ktc.stages.match.select import match
from ktc.stages.match.types import Binding, Match, Matches, NearMiss, NodeRef, NodeSet, SubMatch

__all__ = ["Binding", "Match", "Matches", "NearMiss", "NodeRef", "NodeSet", "SubMatch", "match"]
