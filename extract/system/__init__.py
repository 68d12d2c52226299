"""The process and its disk: files, locks, URLs, optional libraries. Imports errors and `taps.switches`."""
