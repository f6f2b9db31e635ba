"""Muon and AdamW, the learning rate's schedule, the fp16 loss scale and QK-clip."""
