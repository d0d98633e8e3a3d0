"""What a run is: the typed, frozen configuration and how it is read."""
