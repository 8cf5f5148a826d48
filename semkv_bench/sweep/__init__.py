"""Running, resuming and launching sweeps."""
