"""The server's side of a federation: connected clients, cohorts, replies and rounds."""
