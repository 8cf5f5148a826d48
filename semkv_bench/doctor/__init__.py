"""What is missing on this machine, and how to mend it."""
