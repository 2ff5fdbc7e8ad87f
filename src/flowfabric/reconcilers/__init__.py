"""What the passing of time does to the system."""
