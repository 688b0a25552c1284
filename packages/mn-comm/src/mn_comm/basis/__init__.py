"""What everything else stands on: MPI, dtypes, settings, and where arrays are."""
