"""Benches: the real engine, upstream's own against patched, in one run."""
