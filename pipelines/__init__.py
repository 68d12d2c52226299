"""The jobs of layertap and its command line."""
