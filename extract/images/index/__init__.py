"""Image lists on disk: the plans that `layertap plan` writes. Imports what `extract.images` imports."""
