"""The SGLang-style rank, rule by rule (S-…)."""
