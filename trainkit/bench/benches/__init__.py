"""Benches: each with its arms, its columns and the sentence that it comes to."""
