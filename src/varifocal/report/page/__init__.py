"""One HTML page made from the files of runs; the page needs nothing else."""
