"""The lens as one HTML file."""
