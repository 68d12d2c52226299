"""Analysis of a network's layers: inspection, monitors, ablation, attribution. Imports compute, backbones and taps."""
