"""passtime: measure what a forward pass costs, fit a timing model, simulate what it drives."""

__version__ = "0.1.0"
