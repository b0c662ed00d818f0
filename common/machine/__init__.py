"""This machine: its hardware, its GPUs, its load, and whether it is fit for a run."""
