"""`layertap embed`, and the benchmark of `layertap doctor --bench`. Imports `pipelines.terminal`."""
