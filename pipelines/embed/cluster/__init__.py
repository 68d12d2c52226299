"""One data set made by several workers at once: on one machine, on a Ray cluster, or as the tasks of a SLURM array."""
