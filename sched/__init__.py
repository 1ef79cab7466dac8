"""The scheduler rank of an LLM server, and the replay that drives it."""
