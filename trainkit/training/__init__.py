"""The loop and what it is made of: precision, optimizer, schedule, evaluation."""
