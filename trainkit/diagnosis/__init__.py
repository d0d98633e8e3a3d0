"""What happened: which rank failed first, and what it said."""
