"""Composing Hydra's configuration, and choices of the user's own."""
