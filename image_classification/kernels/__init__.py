"""GPU kernels for what no library does in one pass, each beside a plain reference."""
