"""A control plane over HTTP: routes as a table, answers in an envelope, and their description."""
