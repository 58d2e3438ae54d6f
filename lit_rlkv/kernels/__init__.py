"""The hot operations: for each a folder with the plain definition and, where there is one, a fast kernel."""
