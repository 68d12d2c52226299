"""The store: features of many images in HDF5 shards. The file format is described in `extract/store/layout.py`."""
