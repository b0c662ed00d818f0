"""GPU kernels for attention, the loss and a transpose, each beside a plain reference."""
