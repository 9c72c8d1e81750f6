"""What the training loop costs beside the bare step."""
