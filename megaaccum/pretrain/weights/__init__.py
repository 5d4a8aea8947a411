"""Weights in and out of a run: models in Hugging Face's format, their configuration and their files."""
