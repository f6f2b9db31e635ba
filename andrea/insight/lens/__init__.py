"""The lens: every attention head of a model over one prompt, as a page, arrays or a picture."""
