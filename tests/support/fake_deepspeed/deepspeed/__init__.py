"""Stands in for DeepSpeed on nodes: its launcher alone."""
