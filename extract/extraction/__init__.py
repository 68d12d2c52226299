"""A run: extract features of images into a data set. Imports compute, store, images and backbones."""
