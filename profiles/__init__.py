"""The timing-profile document, its predictions, and the profiles that ship."""
