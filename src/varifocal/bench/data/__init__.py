"""How fast batches come out of a data set when nothing else is done."""
