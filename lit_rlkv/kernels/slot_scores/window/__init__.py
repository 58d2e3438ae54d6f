"""Scores that need the latest queries too: attention of a window, and what it leads one to expect."""
