"""Code that all commands share: options, config files, tables, figures, progress. Imports only `extract`."""
