"""The modules that run a compiled model. None of them knows the compiler: pyproject.toml has the contract."""
