"""The vLLM-style rank, rule by rule (V-…), and the TensorRT-LLM policy (T-…)."""
