"""The speed of focused models, beside the dense ones."""
