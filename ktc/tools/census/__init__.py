"""The census: every mixture-of-experts family of the installed transformers, compiled as a twin.

Input: names of families, by default all of transformers. Output: one `Family` per name, never an exception.
"""

from ktc.tools.census.markdown import markdown
from ktc.tools.census.processes import default_jobs, examine_all
from ktc.tools.census.run import examine
from ktc.tools.census.types import BlockProof, Census, Family

__all__ = ["BlockProof", "Census", "Family", "default_jobs", "examine", "examine_all", "markdown"]
