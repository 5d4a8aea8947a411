"""Search for an order of passes and a cut of the layers, priced by a profile."""
