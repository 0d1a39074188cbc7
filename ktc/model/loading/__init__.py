"""Loading an OUT: the model is built, realised, tried and refreshed."""
