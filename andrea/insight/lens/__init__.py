"""The lens: what every head does with one prompt, as a page."""
