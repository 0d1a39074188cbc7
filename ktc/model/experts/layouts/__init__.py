"""How the experts of a layer are stored: as stock, as a model's own module, and packed for a kernel."""
