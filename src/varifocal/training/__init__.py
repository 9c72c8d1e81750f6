"""Config, data and model to a run, and what a model makes of data."""
