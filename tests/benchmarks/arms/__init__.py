"""What others would write: scripts, each whole."""
