"""Scores that need the keys alone: norm, direction, redundancy."""
