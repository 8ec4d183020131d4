"""Worker processes that are ended at their limits of time and memory, and the process that
supervises them."""
