"""Starting ranks on this machine, watching them, and ending them together."""
