"""Pure functions on tensors and numbers: float64 accumulation, keyword-only arguments; must not know taps or limits."""
