"""Checkpoints: in pieces named after the whole model's parameters, in folders that appear whole or not at all."""
