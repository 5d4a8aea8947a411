"""Search for an order of passes (`search`, `greedy`) and a cut of the layers (`cut`), priced by a `profile`; `bound`:
how much better any could be.
"""
