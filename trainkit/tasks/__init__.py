"""What is trained for, one file a task: `base.py` has the protocol."""
