"""What is there: this machine and its site, and what their jobs are doing."""
