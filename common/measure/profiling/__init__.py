"""A training step taken apart: marks in a real loop, a profiler's trace, and a verdict."""
