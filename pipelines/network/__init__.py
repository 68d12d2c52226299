"""`layertap list`, `inspect` and `draw`. Imports `pipelines.terminal`."""
