"""Getting ranks onto machines: who is rank what, where they meet, what is submitted and how."""
