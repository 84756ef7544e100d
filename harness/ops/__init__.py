"""Operators alone: inputs that bite, truths in float64, budgets. Knows tensors; must not know limits.

`suite` runs every operator on a device, `judge` one case, `needs` finds what a model uses; `plugin` is for pytest.
"""
