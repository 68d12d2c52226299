"""`layertap sync`. Imports `pipelines.embed` and `pipelines.terminal`."""
