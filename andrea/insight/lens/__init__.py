"""The lens: shows every attention head of a model on one prompt, as a page or as arrays."""
