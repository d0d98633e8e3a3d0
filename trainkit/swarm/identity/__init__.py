"""Members of a swarm and their proofs: keys, invitations, bans."""
