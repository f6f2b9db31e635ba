"""The room that trains: loss, optimizer, schedule, the trainer, and where its figures go."""
