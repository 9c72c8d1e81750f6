"""A pretrained model whose heads read only what they need: gates are fitted, and heads that can do without the far
text keep a window of it."""
