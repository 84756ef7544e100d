"""Operators repeated on the CPU while a port runs: the port's own calls, each judged against its budget. No limits."""
