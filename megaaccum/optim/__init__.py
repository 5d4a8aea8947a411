"""The optimizer and what moves with it: AdamW, the learning-rate schedule, the loss scale of FP16."""
