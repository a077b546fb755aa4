"""Hostile input by the million: ``python -m tests.fuzz --cases 1000000 --seed N``."""
