"""Several workers build a data set: on one machine, on a Ray cluster, or as the tasks of a SLURM array."""
