"""Training a run: start, the loop and the step, evaluation, planning, loss, optimizer, ranks, records, health."""
