"""Functions by which tasks judge answers: what a text contains, and whether it is right."""
