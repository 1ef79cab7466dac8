"""Cores that keep decoding requests in aggregate: exact, and cheap per pass."""
