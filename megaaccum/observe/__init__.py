"""Measurements of a step: seconds by phase, bytes between ranks, memory by kind."""
