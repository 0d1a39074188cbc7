"""The census: every mixture-of-experts family of the installed transformers, taken through the compiler as a twin.

In: names of families, all that transformers has by default. Out: one `Family` per name, never an exception.
"""

from ktc.census.markdown import markdown
from ktc.census.run import examine
from ktc.census.types import BlockProof, Census, Family

__all__ = ["BlockProof", "Census", "Family", "examine", "markdown"]
