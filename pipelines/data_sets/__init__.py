"""Commands for finished data sets: show, search, report and others. Imports `pipelines.sync` and below."""
