"""Who may do what: callers and their tokens, secrets, and the audit log."""
