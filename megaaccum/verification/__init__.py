"""Proof on a user's own model, data and layout that the accumulated step is the big batch's step."""
