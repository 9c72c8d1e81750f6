"""Tables, plots and pages made from result files; nothing here runs a model."""
