"""The format of a data set on disk: shards, receipts, versions. Imports `extract.system` and `extract.row_status`."""
