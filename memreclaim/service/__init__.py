"""HTTP: the service of one rank, and the head node's view of all of them. Needs the ``server`` extra."""
