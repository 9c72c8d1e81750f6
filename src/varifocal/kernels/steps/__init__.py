"""What a layer does between its matrix products, in one pass each."""
