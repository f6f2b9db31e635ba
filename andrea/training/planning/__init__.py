"""What a run will cost, and what each `auto` becomes."""
