"""What the layers of a network do: inspection, monitors, ablation, attribution. Imports compute, backbones and taps."""
