"""Check the machine, the installation, images, a backbone and an output folder: `layertap doctor`."""
