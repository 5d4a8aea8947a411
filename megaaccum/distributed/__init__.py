"""Ranks: grouped, started, kept in agreement; their random states, and notes for the watchdog."""
