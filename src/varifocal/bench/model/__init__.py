"""The language model against Hugging Face's on the same weights."""
