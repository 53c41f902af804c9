"""``neaptide ledger``: the memory of one rank, region by region, by the code that allocates it."""
