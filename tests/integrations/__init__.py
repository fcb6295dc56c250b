"""Other projects' programs on our sandboxes."""
