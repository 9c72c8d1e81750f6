"""The files that commands write: what is in them, and how they are read."""
