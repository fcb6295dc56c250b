"""Other projects' programs on our sandboxes. Each module needs its project's package, and nothing else imports it."""
