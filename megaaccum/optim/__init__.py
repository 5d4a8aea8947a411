"""The optimizer and what moves with it: AdamW, Muon, the learning-rate schedule, the loss scale of FP16."""
