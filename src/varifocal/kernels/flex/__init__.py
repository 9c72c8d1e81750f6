"""The equation on FlexAttention, torch's generator of attention kernels: for GPUs, and on CPUs to check outputs."""
