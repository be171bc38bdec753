"""What a process of ours sets for itself: threads, allocator, signals, trackers."""
