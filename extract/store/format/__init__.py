"""The format of a data set on disk: shards, receipts, versions. Imports system and row_status."""
