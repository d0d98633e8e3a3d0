"""Life of one peer, from its entry to its end."""
