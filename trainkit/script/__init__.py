"""A training script of the user's own as a rank: started unchanged, looked after, its records kept."""
