"""A run: features of images into a data set, by one worker or several. Imports compute, store, images and backbones."""
