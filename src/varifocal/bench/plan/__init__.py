"""varifocal bench plan: the cost model of `varifocal plan` against this machine."""
