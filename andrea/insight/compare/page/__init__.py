"""The comparison as one HTML file."""
