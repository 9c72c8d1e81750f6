"""Tokens that are decoded one by one, beside others and beside what the machine's memory gives."""
