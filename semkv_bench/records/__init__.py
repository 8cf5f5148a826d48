"""The schema of a record, the run folder, records of others."""
