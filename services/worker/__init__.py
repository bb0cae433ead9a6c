"""The worker process: runs handlers of a named module, and a few built-in kinds to try things with."""
