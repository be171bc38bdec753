"""Files and tensors on disk, and the states of clients, two or three versions of each."""
