"""What runs inside a sandbox: the author's functions, served over MCP and plain HTTP."""
