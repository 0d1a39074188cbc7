"""Seeded faults as a measure: `source` in the code of this tree, the rest in the values between its stages.

`python -m mutants` changes a recipe, a recognised parameter, a rewritten graph, a module or a loaded weight, one at a
time, and reports what notices it. `python tests/mutants/source.py` changes a line of source and runs the quick tests.
"""

from mutants import graphs, modules, recipes, recognised, weights

MUTANTS = (*recipes.MUTANTS, *recognised.MUTANTS, *graphs.MUTANTS, *modules.MUTANTS, *weights.MUTANTS)
