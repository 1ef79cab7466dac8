"""Offline replay: a virtual clock around ranks, and what it reports."""
