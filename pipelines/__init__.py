"""layertap's jobs and command line: one job a file."""
