"""Worker processes that are ended if they exceed their limits of time and memory, and the process
that supervises them."""
