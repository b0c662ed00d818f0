"""Measures what a training step costs: by its compiled kernels, and by a model of a GPU."""
