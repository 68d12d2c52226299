"""Compute features of image batches, eagerly or compiled. Imports backbones, images, taps and system."""
