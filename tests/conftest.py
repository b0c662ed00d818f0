"""Every test, and every process that one starts, computes with one thread: two tests run at a time."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before anything imports torch
