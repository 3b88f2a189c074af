"""Stands in for DeepSpeed's launchers."""
