"""The commands of `layertap`, by what they are about. torch and h5py are imported inside them, not here."""
