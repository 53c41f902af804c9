"""``neaptide doctor``: what is applied and active here, and which promised saving is not in force, and why."""
