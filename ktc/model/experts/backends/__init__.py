"""How a call of a layer's experts is computed: one backend per file, and the choice between them."""
