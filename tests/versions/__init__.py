"""The versions of others' packages that are declared: the lowest and the newest set, each tried as a whole."""
