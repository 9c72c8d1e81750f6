"""The equation, fast: native kernels for CPUs, FlexAttention for GPUs."""
