"""What starts the jobs of runs and is asked for them afterwards: one file a scheduler, each with a `build`."""
