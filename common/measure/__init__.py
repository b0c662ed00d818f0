"""Measure the cost of a training step: by timing, by its compiled kernels, and by a model of a GPU."""
