"""The training loss: cross-entropy in nats, from whole logits or fused with the head, and the loss of a micro-batch."""
