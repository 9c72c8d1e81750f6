"""A local web page that shows what a model's gates, windows and heads do with a text."""
