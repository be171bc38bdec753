"""Settings of FedAccord's own processes: threads, allocator, signals."""
