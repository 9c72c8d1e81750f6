"""Result files to tables and plots: reads files only, never a model."""
