"""The data sets that come with trainkit, a file each."""
