"""The maths of the algorithms: pure functions from arrays and floats to advantages, token losses,
KL and weights.

Nothing here knows the configuration, the model or the trainer. A new algorithm is one function in
the module that is called like what it computes, and one row in `shoal.config.choices`.
"""
