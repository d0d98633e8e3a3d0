"""Judgement of contributions and averages: which to believe."""
