"""What a training run takes, before anybody pays for it."""
