"""What runs a compiled model. Nothing here knows the compiler: its contract is in pyproject.toml."""
