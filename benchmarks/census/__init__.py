"""The census: every mixture-of-experts family of the installed transformers, compiled as a twin.

Input: names of families, by default all of transformers. Output: one `Family` per name, never an exception.
"""

from census.markdown import markdown
from census.processes import default_jobs, examine_all
from census.run import examine
from census.types import BlockProof, Census, Family

__all__ = ["BlockProof", "Census", "Family", "default_jobs", "examine", "examine_all", "markdown"]
