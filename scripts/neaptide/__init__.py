"""neaptide: apply, re-check and ship a structural patch series for vLLM and b12x."""

__version__ = "0.1.0"
