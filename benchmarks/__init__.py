"""Benchmarks; run.py is the way in."""
