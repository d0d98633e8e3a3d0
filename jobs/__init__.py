"""The commands: ``python -m jobs.VERB``, one file a verb."""
