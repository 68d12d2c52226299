"""`layertap sync`, `schedule`, `watch` and `compact`. Imports `pipelines.embed` and `pipelines.terminal`."""
