"""The hook core: `Taps`, `Record`, `Site` and edits. Imports nothing but torch and `extract.errors`."""
