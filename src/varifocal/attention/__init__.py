"""attend, gates, one module for each mechanism, and the conformance kit."""
