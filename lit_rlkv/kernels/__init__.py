"""The hot operations, one folder each: the plain definition, and the Triton kernel that computes the same."""
