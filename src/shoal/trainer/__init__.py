"""Learning from groups: batches, the compiled update, checkpoints, curriculum, evaluation and the
loop."""
