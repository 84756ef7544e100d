"""Ports that need no code of the user: transformers folders, any nn.Module, endpoints, recorded traces.

Must not know stages or limits. Nothing is imported here: each adapter brings its own dependencies, lazily.
"""
