"""`layertap backbones`, `layers`, `inspect`, `draw` and `ablate`. Imports `pipelines.terminal`."""
