"""Workloads: traces in the formats of the field, and synthetic ones."""
