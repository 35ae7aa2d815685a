"""Starting groups of ranks, talking to them, and ending them; never imports torch."""
