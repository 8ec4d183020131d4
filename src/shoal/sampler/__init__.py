"""Sampling: the engine runs compiled steps, the scheduler decides what runs next, `sample_tokens`
picks tokens."""
