"""What a finished run says: results, law fits, tables, figures, claims. Reads a run's files; needs no torch."""
