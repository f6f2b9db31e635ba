"""Other programs' formats: checkpoints are exported, and the export is proven equal by the other program."""
