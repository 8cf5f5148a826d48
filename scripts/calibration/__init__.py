"""The parts of calibrate_statistics.py: made-up scores, what is measured on them, tables and figures."""
