"""Onto machines: what is submitted, how, and who looks after the ranks until they end."""
