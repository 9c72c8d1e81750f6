"""What an attention means: branches, scores, who may see whom, and the reference that defines them all."""
