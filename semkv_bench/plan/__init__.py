"""What a sweep will run, before weights are loaded."""
