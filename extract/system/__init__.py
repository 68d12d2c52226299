"""Process and disk: files, locks, URLs, libraries, PyTorch. Imports `extract.errors` and `taps.torch_internals`."""
