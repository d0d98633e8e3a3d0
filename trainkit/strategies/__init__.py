"""How one model becomes a model on many ranks: one file a strategy."""
