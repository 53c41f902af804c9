"""``neaptide slabs``: bytes of PCIe channels, from the code that allocates them."""
