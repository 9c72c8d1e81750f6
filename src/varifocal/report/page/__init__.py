"""Run files to one HTML page that needs nothing else."""
