"""The equation, fast: native kernels for CPUs."""
