"""What a run learns, one file each, if not the next token of its text: preferences (dpo.py), rewarded answers (grpo.py)."""
