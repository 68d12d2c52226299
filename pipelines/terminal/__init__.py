"""What all commands share: options, config files, tables, figures, progress. Imports `extract` alone."""
