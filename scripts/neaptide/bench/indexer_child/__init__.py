"""Run as a program: ``python indexer_child SPEC RESULT``; see ``__main__.py``."""
