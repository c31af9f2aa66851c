"""What the demo models are, what they learn, and how they are trained and written."""
