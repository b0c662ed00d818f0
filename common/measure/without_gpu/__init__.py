"""A training step compiled for a GPU that is not here, and a model of that GPU."""
