"""Reporting on runs: a log book with settings, results, costs and curves, and a comparison of several."""
