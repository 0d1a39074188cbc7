"""The rows of the zoo, one file per kind of trap."""
