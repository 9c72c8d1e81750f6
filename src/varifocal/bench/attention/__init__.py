"""varifocal bench attention: our kernels beside torch's and those of other packages, on the same inputs in one run."""
