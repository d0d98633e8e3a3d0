"""Who am I: a rank's place among all, from whatever launched it. Nothing inside a job needs `launch/`."""
