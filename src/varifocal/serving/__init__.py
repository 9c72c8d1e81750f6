"""Engines that serve our models to many at once."""
