"""Speed and memory, measured side by side in one run and written to result files."""
