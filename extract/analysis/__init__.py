"""What features and networks are like. Imports compute, store, backbones, taps and system."""
