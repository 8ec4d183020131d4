"""What is optimised: pure functions from arrays and floats to advantages, token losses, divergences and weights.

A new algorithm is one function in the file of its noun, and one line in that file's registry.
"""
