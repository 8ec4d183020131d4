"""Learning from groups: batches, the compiled update, the stream of prompts, evaluation and the
loop."""
