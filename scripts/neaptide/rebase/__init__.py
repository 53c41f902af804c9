"""Planning the series against upstream releases and commits that no pin names yet."""
