"""Conventions of all peers of a run: what they tell one another, when, in which bytes, and how their weights step."""
