"""What the training loop costs beyond the bare step."""
