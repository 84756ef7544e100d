"""day0: verifies that a port of a model to an accelerator is right, stage by stage, and names the first wrong place."""
