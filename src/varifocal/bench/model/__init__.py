"""The language model beside Hugging Face's on the same weights."""
