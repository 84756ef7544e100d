"""Results -> JSON, markdown, JUnit, terminal. Knows records only; must not know how they came about."""
