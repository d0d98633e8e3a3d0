"""Ways by which peers find one another, talk and average. Nothing else in the kit imports hivemind, so a fork or a
successor of it is this room; ``tests/swarm/test_hivemind.py`` says what of it is relied on."""
