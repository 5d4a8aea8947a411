"""Ranks: started, grouped, kept in agreement, watched; and what libraries need on a machine without an accelerator."""
