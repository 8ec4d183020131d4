"""Tasks: one module for each, with its questions, rewards and graders."""
