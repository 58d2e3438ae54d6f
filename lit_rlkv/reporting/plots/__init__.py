"""Figures of a run: pure functions from measurements to matplotlib figures, without pyplot."""
