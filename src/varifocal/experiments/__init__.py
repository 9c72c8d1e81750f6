"""Many runs: comparisons and ablations."""
