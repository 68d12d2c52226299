"""The store: features of many images in HDF5 shards. `extract/store/format/layout.py` specifies the file format."""
