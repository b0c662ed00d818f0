"""The computation of a run: benchmark, methods, optimizer, and one training step."""
