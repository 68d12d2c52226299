"""`layertap embed`, `plan`, `slurm` and `bench`. Imports `pipelines.terminal`."""
