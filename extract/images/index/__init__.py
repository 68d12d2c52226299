"""Images listed once, on disk: the index that `layertap plan` writes. Imports what `extract.images` imports."""
