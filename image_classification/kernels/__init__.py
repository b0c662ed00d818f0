"""GPU kernels for operations that no library computes in one pass, each beside a plain reference."""
