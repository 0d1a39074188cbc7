"""`ktc bench plans` and `ktc plan --calibrate`: predicted times of plans beside those that are measured."""
