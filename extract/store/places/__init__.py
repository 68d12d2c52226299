"""Where data sets are stored: a local folder, a shared folder, a bucket. Imports `extract.store.format`."""
