"""From batches of images to features, whatever runs the network. Imports backbones, images, taps and system."""
