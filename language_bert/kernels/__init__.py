"""GPU kernels for attention, the loss and rounding to FP8, each beside a plain reference."""
