"""Pretraining: the training loop, its checkpoints, evaluations and log."""
