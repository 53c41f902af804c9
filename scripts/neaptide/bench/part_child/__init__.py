"""Run as a program: ``python part_child SPEC RESULT``; see ``__main__.py``."""
