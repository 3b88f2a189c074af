"""Tests; tests/README.md says which ring needs what."""
