"""Server processes of the peers."""
