"""The store: features of many images in HDF5 shards. The file format: `extract/store/format/layout.py`."""
