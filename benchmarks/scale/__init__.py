"""A large deployment, simulated from unit costs that are measured here."""
