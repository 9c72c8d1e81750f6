"""Attention for GPUs, written by hand in Triton: mixtures of windows, prefixes, soft windows and causal attention."""
