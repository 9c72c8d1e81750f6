"""Intervals, tests and paired differences."""
