"""Questions: one task a file, its data and its graders."""
