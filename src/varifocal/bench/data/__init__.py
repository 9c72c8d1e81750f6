"""How fast batches can be read from a data set when nothing else is done."""
