"""Tools of every room: files, programs, terminal, errors."""
