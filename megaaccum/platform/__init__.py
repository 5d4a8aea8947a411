"""The machine under the libraries: a CPU without a GPU, a GPU's properties, noise of libraries, determinism."""
