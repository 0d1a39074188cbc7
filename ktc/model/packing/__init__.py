"""`ktc pack`: the packed store of an OUT is written and verified."""
