"""One file a command of the command line. Imports run/, is imported by cli alone."""
