"""The command line: one verb, one library function."""
