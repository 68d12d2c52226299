"""`layertap probe` and `predict`. Imports `pipelines.terminal`."""
