"""Schedulers and their jobs, the facts of a site, and the rank of a process."""
