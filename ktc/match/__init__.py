"""Matching: which rules find which places in a captured model, and for those that find none, how near they came.

Matching finds and decides nothing: conflicts are `plan`'s. It looks at the captured graphs once; a rewrite never
makes a new match, so the order of rules cannot matter.
"""

from ktc.match.select import match
from ktc.match.types import Binding, Match, Matches, NearMiss, NodeRef, SubMatch

__all__ = ["Binding", "Match", "Matches", "NearMiss", "NodeRef", "SubMatch", "match"]
