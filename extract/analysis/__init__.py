"""Analysis of features and networks. Imports compute, store, backbones, taps and system."""
