"""Data shipped with the library: a small trace of our own, and the function that made it."""
