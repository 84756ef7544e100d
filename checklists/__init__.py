"""Acceptance criteria as data: one TOML file per stage."""
