"""Muon and AdamW, their schedule, loss scale and QK-clip."""
