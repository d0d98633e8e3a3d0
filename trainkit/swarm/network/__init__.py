"""Ways by which peers find one another, talk and average."""
