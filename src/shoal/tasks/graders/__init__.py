"""What a task judges an answer with: pure functions of text."""
