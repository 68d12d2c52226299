"""One HTML page that describes a data set: `layertap report OUT`."""
