"""Destinations for records, and the wrappers that keep them from hurting a run."""
