"""The workspace manager of a vLLM on a GPU: growth, captured addresses, requests over the lock, lanes."""
