"""Data sets: one file a data set, plus what they share (base, order, loader, transforms, files)."""
