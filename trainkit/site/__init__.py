"""What is there: the site's profile, its nodes, and a login node reached by ssh."""
