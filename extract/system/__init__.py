"""Process and disk: files, locks, URLs, libraries, PyTorch settings. Imports `extract.errors` and `taps.switches`."""
