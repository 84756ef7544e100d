"""What a port declares of its numbers: parsed (`scheme`), rounded (`rounding`), applied to a reference (`declare`).

Knows number formats and nn.Modules; must not know taps, runs or limits. `scheme` alone needs no torch.
"""
