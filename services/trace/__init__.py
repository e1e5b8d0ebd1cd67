"""`asyncfabric trace`: recordings of fabrics, put together for Perfetto."""
