"""Decoding tasks into a run's folder, and the audit of what was decoded."""
