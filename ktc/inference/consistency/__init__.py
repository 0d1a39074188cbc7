"""`ktc consistency`: log-probabilities of the same tokens on a trainer's path and on the path that serves."""
