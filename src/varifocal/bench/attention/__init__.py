"""varifocal bench attention: our kernels beside torch's and the peers', on the same inputs in one run."""
