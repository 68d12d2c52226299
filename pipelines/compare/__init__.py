"""Compare backbones and layers on the same images: `layertap compare`."""
