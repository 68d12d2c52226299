"""Where data sets lie: a folder of one machine, a shared folder, a bucket. Imports `extract.store.format`."""
