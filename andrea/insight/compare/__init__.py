"""Many runs side by side, as a page."""
