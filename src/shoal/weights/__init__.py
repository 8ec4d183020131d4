"""Weights: found, read and written in files, laid out over a mesh, published to samplers, kept in
checkpoints."""
