"""Training on several ranks: the process group, DDP and FSDP2, the watchdog, and checkpoints written by many ranks."""
