"""Results to tables, plots and pages; reads files only."""
