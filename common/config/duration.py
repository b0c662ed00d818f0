"""The time of evaluations, from the rate of training.

A training step is a forward and a backward pass. The backward pass has two matrix multiplications for each
one of the forward pass, and takes about twice as long; an evaluation is a forward pass alone.
"""

FORWARD, BACKWARD = 1 / 3, 2 / 3  # of the compute time of a training step


def evaluation_seconds(num_evaluations: int, num_samples: int, samples_per_s: float) -> float:
    """Return the time of evaluations of `num_samples` each, where training takes `samples_per_s`."""
    return num_evaluations * num_samples * FORWARD / samples_per_s
