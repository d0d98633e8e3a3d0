"""Recovery: which failures are worth another start, and ranks that start again in place."""
