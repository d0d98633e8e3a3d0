"""Diagnosis: the rank that failed first, its words, the cause and what mends it."""
