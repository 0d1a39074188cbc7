"""Commands beside the compiler: benchmarks, the census, and entrances from KTransformers and LLaMA-Factory."""
