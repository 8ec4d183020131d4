"""Sampling: the engine runs compiled steps, the scheduler decides which step runs next, and
`sample_tokens` chooses tokens."""
