"""What the sparse indexer's plans of b12x reserve, region by region."""
