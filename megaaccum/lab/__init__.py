"""Thinking about steps: layouts and their cost, orders of passes, proofs of equality."""
