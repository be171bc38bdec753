"""Files and tensors on disk, and the states of clients in two or three versions each."""
